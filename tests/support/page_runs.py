"""Runs the commands of a page as a reader would: `python tests/support/page_runs.py docs/how-to/serve.md`.

All blocks run in order, in one folder that looks like a clone, with one home folder. Where the system permits, the page
has a network of its own, without the internet and with all ports free; elsewhere, pages take turns. Sizes are a
sixty-fourth of those on the page, and folders such as /var/lib are below the page's own folder. Names of models lead to
one tiny model with random weights, so that a server starts in seconds.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from hub_models import write_hub_cache, write_tiny_model
from markdown_links import ROOT
from page_blocks import BACKGROUND, FILE, NOT_RUN, Block, blocks_of, is_quoting
from page_checks import is_only_checked

DEADLINE_S = 540.0  # for a block, and for a server until it is ready: reached only when a test fails
_STOP_S = 60.0
_MIB_PER_GIB = 16
_COPIED = ("configs", "examples")  # the rest of the clone is linked
_HUB_NAME = re.compile(r"\b(?:Qwen|meta-llama|google|mistralai|HuggingFaceTB|openai|microsoft)/[\w.-]*\w")
_SYSTEM_FOLDER = re.compile(r"(?<![\w./~-])/(?:etc|run|srv|tmp|var|models)/")
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
_CURL_SETTINGS = "fail-with-body\nno-progress-meter\nnoproxy = *\n"
_REPORT = "This report was written by Ann Example. The bridge costs 12 million euros and opens in May. " * 40
_FILES = {  # that readers bring
    "report.txt": _REPORT,
    "question.txt": f"{_REPORT}\n\nQuestion: Who wrote it?\nAnswer:",
    "chat.json": '{"messages": [{"role": "user", "content": "Say hello."}]}',
}


class PageError(Exception):
    """A command on a page that failed, with its output."""


@dataclass
class PageRun:
    """The folders of one page, and the servers that its blocks have started."""

    folder: Path
    hub: Path
    servers: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def clone(self) -> Path:
        """The folder in which the commands run."""
        return self.folder / "kvtier"

    def prepare(self) -> None:
        """Create the folders, and the files that readers bring."""
        for path in ROOT.iterdir():
            if path.name in _COPIED:
                shutil.copytree(path, self.clone / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not path.name.startswith(".") and path.name != "build":
                self.clone.mkdir(exist_ok=True)
                (self.clone / path.name).symlink_to(path)
        for name, text in _FILES.items():
            (self.clone / name).write_text(text)
        for name in ("home", "run", "tmp"):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "home" / ".curlrc").write_text(_CURL_SETTINGS)
        (self.folder / "exported").write_text("")
        (self.folder / "where").write_text(str(self.clone))

    def do(self, block: Block) -> None:
        """Run a block, start its server, or save its file."""
        if block.mark == FILE:
            path = self.clone / block.said
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.adapted(block.text))
        elif block.language == "python" and block.mark != NOT_RUN:
            (self.clone / "page.py").write_text(self.adapted(block.text))
            self._run(block, "python page.py\n")
        elif block.is_shell and block.mark != NOT_RUN:
            commands = [self.adapted(each) for each in block.commands() if not is_only_checked(each)]
            script = "\n".join(commands) + "\n"
            if block.mark == BACKGROUND:
                self._start(block, script)
            elif commands:
                self._run(block, script)

    def adapted(self, text: str) -> str:
        """The text with small sizes, and with the system's folders below the page's own."""
        small = re.sub(r"\b(\d+)GiB\b", lambda size: f"{int(size[1]) * _MIB_PER_GIB}MiB", text)
        return _SYSTEM_FOLDER.sub(lambda place: f"{self.folder}{place[0]}", small)

    def end(self) -> None:
        """End all servers."""
        for port in list(self.servers):
            self._end_server(port)

    def _run(self, block: Block, script: str) -> None:
        with tempfile.TemporaryFile() as output:
            process = self._spawn(f"{script}export -p > {self.folder}/exported\npwd > {self.folder}/where\n", output)
            try:
                status = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            said = output.read().decode(errors="replace")
        print(f"--- {block.place}\n{script}{said}", flush=True)
        if status:
            self._fail(block, f"exit status {status}" if status > 0 else f"no end within {DEADLINE_S:.0f} s", said)

    def _start(self, block: Block, script: str) -> None:
        """Start a server in place of the one that has its port, and wait until its address answers."""
        port = urlsplit(block.said).port or 80
        self._end_server(port)
        if _answers(block.said):
            self._fail(block, f"another program has port {port}; end it", "")
        log = self.folder / f"server-{port}.log"
        with log.open("wb") as output:
            process = self.servers[port] = self._spawn(script, output)
        give_up_at = time.monotonic() + DEADLINE_S
        while not _answers(block.said):
            if process.poll() is not None:
                self._fail(block, f"the server ended with status {process.returncode}", log.read_text())
            if time.monotonic() > give_up_at:
                self._fail(block, f"{block.said} did not answer", log.read_text())
            time.sleep(0.2)
        print(f"--- {block.place} (server)\n{script}{log.read_text()}", flush=True)

    def _spawn(self, script: str, output: IO[bytes]) -> "subprocess.Popen[bytes]":
        where = (self.folder / "where").read_text().strip()
        whole = f"set -a -e -o pipefail\nsource {self.folder}/exported\n{script}"
        return subprocess.Popen(
            ["bash", "-c", whole],
            cwd=where,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {
            "PATH": path,
            "HOME": str(self.folder / "home"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "*",
            "HF_HOME": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_API_KEY": "none",
        }

    def _end_server(self, port: int) -> None:
        process = self.servers.pop(port, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _fail(self, block: Block, what: str, said: str) -> None:
        logs = "".join(
            f"\n{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in self.folder.glob("server-*.log")
        )
        raise PageError(f"{block.place}: {what}\n{said[-4000:]}{logs}")


def runnable_blocks(path: Path, root: Path = ROOT) -> list[Block]:
    """The blocks of a page that are run, started or saved, in order."""
    name = path.relative_to(root).as_posix()
    blocks = [] if is_quoting(name) else blocks_of(path, root)
    return [block for block in blocks if _is_runnable(block)]


def is_quick(blocks: Sequence[Block]) -> bool:
    """Whether the blocks of a page start no server and import no model."""
    kvtier = [command for block in blocks if block.is_shell for command in block.commands() if "kvtier" in command]
    return not kvtier and not any(block.mark == BACKGROUND or block.language == "python" for block in blocks)


def run_page(path: Path, root: Path = ROOT, model: Path | None = None) -> None:
    """Run a page in this process's network. Raises PageError at the first command that fails.

    Args:
        path: The page.
        root: The folder that names of pages begin at.
        model: Folder of the tiny model. If it does not exist, the model is written there.
    """
    blocks = runnable_blocks(path, root)
    with tempfile.TemporaryDirectory(prefix="kvtier-page-") as folder:
        run = PageRun(Path(folder), Path(folder) / "hub")
        run.prepare()
        _add_models(run, " ".join(block.text for block in blocks), model or Path(folder) / "tiny-model")
        try:
            for block in blocks:
                run.do(block)
        finally:
            run.end()


def command_for(path: Path, *options: object) -> list[str]:
    """The command that runs a page with *options*, in a network of its own if the system permits that."""
    own = ["unshare", "--user", "--net", "--map-root-user"]
    may = shutil.which("unshare") and subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0
    command = [sys.executable, __file__, str(path), *map(str, options)]
    return [*own, *command, "--own-network"] if may else command


def _add_models(run: PageRun, text: str, model: Path) -> None:
    """Make the names of models in *text* lead to *model*: names on the hub, and smollm2, here a folder."""
    names = sorted(set(_HUB_NAME.findall(text)))
    if names or "smollm2" in text:
        if not model.exists():
            write_tiny_model(model, (ROOT / "DESIGN.md").read_text())
        write_hub_cache(run.hub, names, model.resolve())
        shutil.copytree(model, run.clone / "smollm2")


def _is_runnable(block: Block) -> bool:
    if block.mark == FILE:
        return True
    if block.mark == NOT_RUN:
        return False
    if block.is_shell:
        return not all(map(is_only_checked, block.commands()))
    return block.language == "python"


def _answers(url: str) -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=30) as answer:
            return int(answer.status) == 200
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Wait for this page's turn to have the machine's ports."""
    with (Path(tempfile.gettempdir()) / f"kvtier-pages-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))


def main() -> int:
    """Run the pages that the arguments name."""
    parser = argparse.ArgumentParser(description="Runs the commands of pages.")
    parser.add_argument("page", nargs="+", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--model", type=Path, help="folder of the tiny model, which is written if it does not exist")
    parser.add_argument(
        "--own-network", action="store_true", help="the process has a network of its own, which is down"
    )
    options = parser.parse_args()
    if options.own_network:
        _bring_up_loopback()
    try:
        with contextlib.nullcontext() if options.own_network else _turn():
            for page in options.page:
                run_page(page.resolve(), options.root.resolve(), options.model)
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
