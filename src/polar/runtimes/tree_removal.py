"""Removing folders that are made to be hard to remove: deeper than a stack or a path is long, without permissions.

A folder's folders are moved up, beside one another, and emptied there in turn, so that nothing gets deep. Links are
removed, never followed. What is in use, as a mount is, is an OSError.
"""

import errno
import os
import secrets
import stat

_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_folder(name: str, folder: int) -> None:
    """Removes the folder of that name in an open one. Nothing else writes to it meanwhile."""
    opened = _open_folder(name, folder)
    try:
        while entries := os.listdir(opened):
            for entry in entries:
                if _is_folder(entry, opened):
                    _flatten(entry, opened)
                else:
                    os.unlink(entry, dir_fd=opened)
    finally:
        os.close(opened)
    os.rmdir(name, dir_fd=folder)


def _flatten(name: str, folder: int) -> None:
    """Moves the folders in one up beside it, and removes the rest of it and itself."""
    opened = _open_folder(name, folder)
    try:
        for entry in os.listdir(opened):
            if _is_folder(entry, opened):
                _move_up(entry, opened, folder)
            else:
                os.unlink(entry, dir_fd=opened)
    finally:
        os.close(opened)
    os.rmdir(name, dir_fd=folder)


def _move_up(name: str, below: int, folder: int) -> None:
    os.chmod(name, 0o700, dir_fd=below)
    try:
        os.rename(name, secrets.token_hex(12), src_dir_fd=below, dst_dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove_folder(name, below)  # an overlay can't move what its image has, which is not that deep


def _open_folder(name: str, folder: int) -> int:
    os.chmod(name, 0o700, dir_fd=folder)
    return os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=folder)


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
