"""`python -m quafl.cli`."""

from quafl.cli import app

if __name__ == "__main__":
    app()
