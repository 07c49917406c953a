"""``python -m kvxfer``: the program, where no script of its name is on the path."""

from kvxfer.cli import run

if __name__ == "__main__":
    run(name="kvxfer")
