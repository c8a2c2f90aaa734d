"""`python -m loaderpool.tools.cli` is `loaderpool`, also where the script is not on the PATH."""

import sys

from loaderpool.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
