"""`python -m outlast.ft.train` for torchrun: a rank of one replica group."""

import sys

from outlast.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--fault_tolerance.enable", *sys.argv[1:]]))
