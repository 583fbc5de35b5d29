"""The entry agent of the self-contained tree: `bin/python -I -S exec.py COMMAND ARGUMENT...`."""

import sys

# The module alone: importing the package around it costs more than all that it does.
sys.path.append(f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/dispatch_agent")

import prologue

prologue.main(sys.argv[1:])
