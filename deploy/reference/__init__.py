"""The pages of docs/reference, made from the code: `python -m deploy.reference` writes them, `--check` compares them.

`pages` lists them; each has a module. A page has nothing of the machine that makes it: what a default is made of at the
start of a command has to have a text of its own (`show_default`).
"""
