/* Starts the tree's own Python through the tree's own loader, wherever the tree stands: `bin/dispatch-agent`,
 * `bin/publish` and `bin/python` are this program under three names.
 *
 * Linked statically, so that the image it runs in needs no C library, and variables that are meant for the trainer's
 * (LD_PRELOAD, LD_LIBRARY_PATH, ...) do nothing to it. They would to the loader that it starts, which has libraries of
 * another age: so it hands them on under other names, and entry.py and the entry agent give them back.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#define KEPT "_AGENT_KEPT_"

static char *below(const char *tree, const char *path) {
  char *whole;
  if (asprintf(&whole, "%s/%s", tree, path) < 0) abort();
  return whole;
}

static int refuse(const char *what, const char *why) {
  fprintf(stderr, "dispatch: cannot run %s: %s\n", what, why);
  return 125;
}

int main(int argc, char **argv, char **environ) {
  /* Where there is no /proc, the name that it was called by; in a script's first line that would be the script's. */
  char tree[PATH_MAX];
  if (!realpath("/proc/self/exe", tree) && !realpath((char *)getauxval(AT_EXECFN), tree))
    return refuse(argv[0], strerror(errno));
  char *name = strrchr(tree, '/');
  *name++ = '\0';
  *strrchr(tree, '/') = '\0'; /* without bin */
  if (strpbrk(tree, ":;$")) return refuse(tree, "the loader takes no folder with one of : ; $ in its name");

  size_t count = 0;
  while (environ[count]) count++;
  char **handed = calloc(count + 1, sizeof *handed);
  char **words = calloc((size_t)argc + 12, sizeof *words);
  if (!handed || !words) return refuse(tree, strerror(errno));
  for (size_t i = 0; i < count; i++) {
    int meant_for_a_loader = !strncmp(environ[i], "LD_", 3) || !strncmp(environ[i], "GLIBC_TUNABLES=", 15);
    handed[i] = environ[i];
    if (meant_for_a_loader && asprintf(&handed[i], KEPT "%s", environ[i]) < 0) abort();
  }

  size_t next = 0;
  words[next++] = below(tree, "libexec/dispatch-agent");
  words[next++] = "--argv0";
  words[next++] = below(tree, "bin/python"); /* Python looks for its library from here, and calls it its executable */
  words[next++] = "--inhibit-cache";
  words[next++] = "--library-path";
  words[next++] = below(tree, "lib");
  words[next++] = below(tree, "libexec/python");
  if (strcmp(name, "python") != 0) {
    words[next++] = "-I";
    words[next++] = below(tree, "entry.py");
    words[next++] = name;
  }
  for (int i = 1; i < argc; i++) words[next++] = argv[i];
  execve(words[0], words, handed);
  return refuse(words[0], strerror(errno));
}
