"""The torch core: models, block cache, tree attention, scheduling and lossless verification."""

import logging

# transformers imports torchao wherever it is installed, and torchao then warns of kernels that
# are built for other hardware than this machine's.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
