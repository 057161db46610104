"""The ``specrag`` command line.

Exit codes: 0 all went well; 2 the input is at fault; 3 a service is; 130 Ctrl-C. Errors are one
line on stderr.
"""

import os

from specrag_client.proxies import loopback_exemption

# Before gRPC is imported: its own log lines would stand between ours on stderr, and a proxy would
# stand between us and the local stack.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251 - set for gRPC, not read
os.environ.update(loopback_exemption(os.environ))  # noqa: TID251 - set for gRPC

from specrag_client.cli.run import main

__all__ = ["main"]
