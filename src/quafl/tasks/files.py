"""Where a dataset's files are: in $QUAFL_DATA, in the user's cache, in a Debian package's folder, or on the web."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "QUAFL_DATA"
SYSTEM = Path("/usr/share/datasets")  # Debian's dataset packages


class DataError(Exception):
    """A dataset that is not here, or not what it should be."""


@contextmanager
def needed() -> Iterator[None]:
    """Imports of what comes with the extra `data`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(f"the built-in datasets need {error.name}: pip install 'quafl[data]'") from error


@dataclass(frozen=True, slots=True)
class Files:
    """The original files of a dataset."""

    title: str
    folder: str  # below $QUAFL_DATA, the cache, and Debian's folder
    md5: Mapping[str, str]  # by the name of each file
    url: str | None = None  # of the folder that holds them; without, they cannot be downloaded
    archive: tuple[str, str] | None = None  # a tar file that holds all of them instead, and its md5
    why: str = "its licence does not let us offer it"  # they cannot be

    def find(self) -> dict[str, Path]:
        """Each file's place, uncompressed ones welcome too; downloaded if it is nowhere."""
        found = self.here()
        if found is not None:
            return found
        self._download(cache_folder() / self.folder)
        return {name: cache_folder() / self.folder / name for name in self.md5}

    def here(self) -> dict[str, Path] | None:
        """Each file's place, if all are on this machine."""
        for place in self.places():
            found = {name: _either(place / name) for name in self.md5}
            if all(path.exists() for path in found.values()):
                return found
        return None

    def places(self) -> list[Path]:
        """Where they are looked for."""
        return [place / self.folder for place in (_own(), cache_folder(), SYSTEM) if place is not None]

    def _download(self, folder: Path) -> None:
        with needed():
            import pooch
        try:
            pooch.get_logger().setLevel("WARNING")  # the bar says what is being downloaded
            if self.archive is not None and self.url is not None:
                name, md5 = self.archive
                unpack = pooch.Untar(members=[f"{self.folder}/{file}" for file in self.md5], extract_dir=".")
                pooch.retrieve(
                    self.url + name, f"md5:{md5}", name, folder.parent, processor=unpack, progressbar=_Bar(name)
                )
            elif self.url is not None:
                for file, md5 in self.md5.items():
                    pooch.retrieve(self.url + file, f"md5:{md5}", file, folder, progressbar=_Bar(file))
            else:
                raise DataError(self.why)
        except (OSError, ValueError, DataError) as error:  # no network, a wrong checksum, no permission
            reason = str(error) if isinstance(error, DataError) else type(error).__name__
            reason = "the download is not the file that was published" if isinstance(error, ValueError) else reason
            raise DataError(
                f"{self.title} is not on this machine and cannot be downloaded ({reason}): put "
                f"{', '.join(self.md5)} into a folder {self.folder}/, and name the folder that holds it in "
                f"{ENVIRONMENT} (now {os.environ.get(ENVIRONMENT) or 'not set'})"
            ) from error


def _own() -> Path | None:
    own = os.environ.get(ENVIRONMENT)
    return Path(own).expanduser() if own else None


def cache_folder() -> Path:
    """Where this package keeps what it can get again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quafl"


def _either(path: Path) -> Path:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return plain if plain.exists() else path


class _Bar:
    """pooch's progress, shown by rich."""

    def __init__(self, name: str) -> None:
        from rich.progress import DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns)
        self._task = self._progress.add_task(name, total=None)
        self._progress.start()

    @property
    def total(self) -> int:
        """Octets in all."""
        return int(self._progress.tasks[0].total or 0)

    @total.setter
    def total(self, octets: int) -> None:
        self._progress.update(self._task, total=octets)

    def update(self, octets: int) -> None:
        """That many more have come."""
        self._progress.advance(self._task, octets)

    def reset(self) -> None:
        """From the beginning."""
        self._progress.reset(self._task, total=self._progress.tasks[0].total)

    def close(self) -> None:
        """The end."""
        self._progress.stop()
