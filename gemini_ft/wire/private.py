"""Places on a shared machine that no other user can have prepared: folders, files and listeners of this very user.

Names under the temporary directory, and abstract socket addresses, can be guessed and taken by any local user before this
process comes. So nothing is written to, and nothing is said, before the owner has been looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

from gemini_ft.errors import AgentError, ConfigError

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def runtime_folder() -> Path:
    """The folder of this user for logs and the like, made with mode 0700.

    It is ``gemini-ft`` in XDG_RUNTIME_DIR where there is one, else ``gemini-ft-UID`` in the temporary directory.

    Raises ConfigError: a link, another user's folder, or one that others may write to stands there; or there is no place for any.
    """
    home = os.environ.get("XDG_RUNTIME_DIR", "")
    if home and os.access(home, os.W_OK):
        return own_folder(Path(home) / "gemini-ft")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no folder for temporary files ({error.strerror}): mount one at /tmp, or name one that can be written to by TMPDIR"
        ) from None
    return own_folder(temporary / f"gemini-ft-{os.getuid()}")


def newest_first(paths: Iterable[Path]) -> list[tuple[float, Path]]:
    """The paths with the time of their last change, by it; those that are gone by now are left out."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append((path.stat().st_mtime, path))
    return sorted(times, reverse=True)


def own_folder(path: Path) -> Path:
    """Makes the folder ``path`` with mode 0700 if it is missing, and checks that it is this user's alone.

    Raises ConfigError: it is a link or no folder, another user's, or others may write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    way_out = "remove it, or name another folder (GEMINI_LOG_DIR for logs, GEMINI_FAULTS_DIR for drills, TMPDIR for both)"
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a {'link' if stat.S_ISLNK(found.st_mode) else 'file'} where a folder of this user is due; {way_out}")
    if found.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to uid {found.st_uid}, and this process is uid {os.getuid()}; {way_out}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so that others may write to it; `chmod 700 {path}`")
    return path


def check_way(path: Path) -> None:
    """Checks that no other user can put something else in the place of what lies at ``path``: who owns a folder renames what is in it.

    Folders on the way may be open to all with the sticky bit, as /tmp is. A mounted volume may be so without, which container
    runtimes make for one container.

    Raises ConfigError: a link or a folder on the way is another user's, or open to others.
    """
    trusted, way = {0, os.getuid()}, [path.absolute(), path.resolve()]
    if not any(line.split()[0] == "0" for line in Path("/proc/self/uid_map").read_text().splitlines()):  # root has no number in here
        trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    for place in dict.fromkeys(each for end in way for each in (end, *end.parents)):
        with contextlib.suppress(FileNotFoundError):
            found = place.lstat()
            if found.st_uid not in trusted:
                raise ConfigError(
                    f"{place} belongs to uid {found.st_uid}, who can put anything in the place of {path}; name another folder"
                )
            is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
            if stat.S_ISDIR(found.st_mode) and is_open and not place.is_mount():
                raise ConfigError(
                    f"{place} has mode {stat.S_IMODE(found.st_mode):04o}, so that others can put anything in the place of {path}; "
                    f"`chmod +t {place}`, or name another folder"
                )


def open_log(path: Path) -> int:
    """Descriptor of a log file to append to, of mode 0600 when it is new. No link is followed.

    Raises ConfigError: it is a link, no plain file, one that has another name too, or another user's. OSError: the disk is full.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"the log {path} cannot be opened ({error.strerror}); remove it, or set GEMINI_LOG_DIR") from None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.getuid():
        os.set_blocking(fd, True)
        return fd
    os.close(fd)
    raise ConfigError(
        f"the log {path} is no plain file of one name and of uid {os.getuid()}; remove it, or name another folder (GEMINI_LOG_DIR)"
    )


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id and uid of the other side of a connected Unix socket, as the kernel noted them when it connected or listened."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def check_listener(sock: socket.socket, what: str) -> None:
    """Checks that a process of this user listens at the other end of ``sock``, before anything is sent to it.

    Raises AgentError: another user's process has taken the address.
    """
    pid, uid = credentials(sock)
    if uid != os.getuid():
        raise AgentError(
            f"process {pid} of uid {uid} listens at the address of {what}, which belongs to uid {os.getuid()}; nothing was said to it. "
            "Have that process ended, or give the run another id (GEMINI_RUN_ID)"
        )
