"""The local stack: every process of the mesh on one machine, in one folder.

``plan`` says what to run (pure), ``launcher`` runs it, ``record`` remembers it in
``stack.json``, ``shutdown`` ends it in order. Each process leads a session of its own, so that
what it leaves behind can be found.
"""
