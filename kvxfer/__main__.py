"""``python -m kvxfer``: the program, where no script of its name is on the path."""

if __name__ == "__main__":
    from kvxfer.cli.main import app

    app(prog_name="kvxfer")
