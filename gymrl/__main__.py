"""``python -m gymrl``: the command line."""

from gymrl.cli import main

if __name__ == "__main__":
    main()
