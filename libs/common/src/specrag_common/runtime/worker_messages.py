"""What parent and child of a worker tell each other besides the caller's own objects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What the child is to run.

    Attributes:
        import_path: ``sys.path`` of the parent; the target is looked up there.
        target: ``module:function``, imported in the child.
        pickled_args: positional arguments after the connection, unpickled once the path is set.
    """

    import_path: tuple[str, ...]
    target: str
    pickled_args: bytes


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """Last message of a child whose target raised."""

    message: str
