"""`python -m ipslimit`: the command `ipslimit`, also where no folder of scripts is on the path."""

from .experiments.cli import main

if __name__ == "__main__":
    main()
