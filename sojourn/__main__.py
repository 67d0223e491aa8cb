"""`python -m sojourn`: the command line."""

from sojourn import main

if __name__ == "__main__":
    main()
