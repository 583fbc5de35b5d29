"""`bin/dispatch-agent` and `bin/publish` of the self-contained tree: `python -I entry.py NAME ARGUMENT...`."""

import os
import sys

KEPT = "_AGENT_KEPT_"  # launch.c's: what was meant for the loader of other programs, and is theirs again from here on
for name in [name for name in os.environ if name.startswith(KEPT)]:
    os.environ[name.removeprefix(KEPT)] = os.environ.pop(name)

# Our OpenSSL looks where Debian has its certificates. The image around us may have them elsewhere, or none.
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    f"{sys.prefix}/etc/ca-certificates.crt",
)
if sys.argv[2:3] != ["exec"] and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys():
    os.environ["SSL_CERT_FILE"] = next(path for path in BUNDLES if os.path.exists(path))

from dispatch_agent import __main__  # noqa: E402 (with the environment as it was meant)

sys.argv[:] = sys.argv[1:]
{"dispatch-agent": __main__.main, "publish": __main__.publish}[sys.argv[0]]()
