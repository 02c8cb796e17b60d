"""A teacher from nothing, its retrofits and their evaluation: `python -m benchmarks.lab`.

`scales` holds the sizes, `tasks` how data is made and evaluated, `steps` the commands in order.
"""
