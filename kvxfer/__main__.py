"""``python -m kvxfer``: the program, where no script of its name is on the path."""

from kvxfer.cli.main import app

app(prog_name="kvxfer")
