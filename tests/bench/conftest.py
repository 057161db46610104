import sys
from pathlib import Path

# The benches are no installed package: they run from the repository's root, as modules.
sys.path.append(str(Path(__file__).parents[2]))
