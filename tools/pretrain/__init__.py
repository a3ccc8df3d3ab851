"""How the embedded models fedvl-tiny and fedvl-tiny-vilt were made; see README.md in this folder.

A development tool: it needs `transformers` (extra `dev`) and is not part of the installed package.
"""
