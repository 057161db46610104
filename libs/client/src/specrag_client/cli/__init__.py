"""The ``specrag`` command line.

Exit codes: 0 all went well; 2 the input is at fault; 3 a service is; 130 Ctrl-C. Errors are one
line on stderr.
"""

import os

# Before gRPC is imported: its own log lines would stand between ours on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251 - set for gRPC, not read

from specrag_client.cli.run import main

__all__ = ["main"]
