"""`python -m tickwheel`: the command line."""

from tickwheel.cli import main

if __name__ == "__main__":
    main()
