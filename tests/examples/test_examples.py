"""Each example, run as its first line says. The served model looks facts up, so a wrong answer shows."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdf import write_pdf
from serving import MODEL, Address, serving, tables
from small_models import build
from tool_templates import tool_tokenizer
from vision_models import build_vision

from kvtier.cli.demo.document import Document, Fact, make_document
from kvtier.cli.demo.model import build_demo_model

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK_SIZE = 16
NUM_TOKENS = 1200
PROGRAMS = sorted(file.name for file in EXAMPLES.glob("*.py") if "__main__" in file.read_text())
PROCESS_TIMEOUT_S = 300.0  # for what takes seconds: reached only when a test fails
TABLES = {
    "device": {"capacity": "64MiB", "block_size": BLOCK_SIZE},
    "host": {"capacity": "64MiB"},
    "scheduler": {"load": "always", "prefill_chunk": 256, "token_budget": 512},
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    """The demo's model, with a template that adds nothing behind the question."""
    model, tokenizer = build_demo_model()
    tokenizer.chat_template = TEMPLATE
    with serving(model, TABLES, tokenizer=tokenizer) as address:
        yield address


def of_server(address: Address) -> list[str]:
    return ["--base-url", f"{address.url}/v1", "--model", MODEL, "--max-tokens", "4"]


def write_text(folder: Path, seed: int) -> tuple[Path, Document]:
    document = make_document(seed, NUM_TOKENS)
    file = folder / "book.txt"
    file.write_text(document.text)
    return file, document


def question(fact: Fact) -> str:
    return f"The book says that the code of {fact.name} is"


def run(name: str, *arguments: object, turns: str = "", python: object = sys.executable) -> str:
    """Run the example: what it prints."""
    done = subprocess.run(
        [str(part) for part in (python, EXAMPLES / name, *arguments)],
        input=turns,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def origins(output: str) -> list[dict[str, int]]:
    """The tokens by tier that the example prints after each answer."""
    told = re.findall(r"\[(.*); first token after", output)
    counts = [re.findall(r"(\d[\d,]*) (\w+)", line) for line in told]
    return [{tier: int(count.replace(",", "")) for count, tier in those} for those in counts]


def answered(output: str, facts: list[Fact]) -> bool:
    """Whether each fact's word is the answer below its question, in this order."""
    pattern = ".*".join(rf"{re.escape(question(fact))}\s+{fact.word}" for fact in facts)
    return re.search(pattern, output, re.DOTALL) is not None


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_needs_no_server(name: str) -> None:
    if not installed(name):
        pytest.skip("its package is not installed; make .venv/llama-index/installed")

    assert "--model" in run(name, "--help", python=interpreter(name))


def test_a_pdf_is_read_once_and_then_asked(server: Address, tmp_path: Path) -> None:
    document = make_document(1, NUM_TOKENS)
    facts = list(document.facts[:2])
    write_pdf(tmp_path / "book.pdf", document.text.replace(". ", ".\n"))

    output = run("ask_document.py", *of_server(server), tmp_path / "book.pdf", *map(question, facts))

    first, second = origins(output)
    assert answered(output, facts)
    assert first.keys() == {"recomputed"}
    assert first["recomputed"] > NUM_TOKENS
    assert second["device"] > NUM_TOKENS
    assert second["recomputed"] < 2 * BLOCK_SIZE


def test_the_pages_of_a_pdf_are_seen_once_and_then_asked(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    for part in seen.parts():
        part.save_pretrained(tmp_path / "model")
    write_pdf(tmp_path / "book.pdf", "\n".join(f"Line {number} of the book" for number in range(120)))
    with serving(str(tmp_path / "model"), TABLES, tokenizer=seen.tokenizer) as server:
        output = run("ask_pages.py", *of_server(server), "--last", "2", tmp_path / "book.pdf", "What?", "Who?")
        num_encoded = server.ask(lambda core: core.images.statistics().num_encoded)

    first, second = origins(output)
    assert num_encoded == 2
    assert first.keys() == {"recomputed"}
    assert second["device"] > first["recomputed"] - 2 * BLOCK_SIZE


def test_a_text_may_be_asked_too(server: Address, tmp_path: Path) -> None:
    file, document = write_text(tmp_path, 2)
    facts = list(document.facts[:1])

    output = run("ask_document.py", *of_server(server), file, *map(question, facts))

    assert answered(output, facts)


def test_a_text_that_the_anthropic_client_asks_about_is_kept_and_then_read(server: Address, tmp_path: Path) -> None:
    if not installed("ask_anthropic.py"):
        pytest.skip("Anthropic's client is not installed; pip install anthropic")
    file, document = write_text(tmp_path, 9)
    facts = list(document.facts[:2])

    output = run("ask_anthropic.py", *of_server(server), file, *map(question, facts))

    told = re.findall(r"\((\d+) read, (\d+) kept from now on\)", output)
    (read_first, kept_first), (read_then, kept_then) = [(int(read), int(kept)) for read, kept in told]
    assert answered(output, facts)
    assert read_first + kept_first >= NUM_TOKENS  # in whole blocks; other documents may begin as this one does
    assert kept_first > NUM_TOKENS // 2
    assert (read_then >= NUM_TOKENS, kept_then) == (True, 0)


def test_ten_users_compute_a_document_once(server: Address, tmp_path: Path) -> None:
    file, document = write_text(tmp_path, 3)
    facts = list(document.facts[:5])

    output = run("ten_users.py", *of_server(server), file, *map(question, facts))

    tokens = origins(output)
    assert len(tokens) == 10
    assert all(len(re.findall(rf"{question(fact)}\s+{fact.word}", output)) == 2 for fact in facts)
    assert sum(those["recomputed"] for those in tokens) < 2 * NUM_TOKENS


def test_retrieval_with_langchain_finds_the_passage_and_then_the_cache(server: Address, tmp_path: Path) -> None:
    if not installed("rag_langchain.py"):
        pytest.skip("LangChain is not installed; pip install langchain-openai")
    file, document = write_text(tmp_path, 4)
    facts = [document.facts[3]] * 2

    output = run("rag_langchain.py", *of_server(server), file, *map(question, facts))

    cached = [int(count) for count in re.findall(r"\[(\d+) of \d+ tokens cached\]", output)]
    assert answered(output, facts)
    assert cached[0] == 0
    assert cached[1] > BLOCK_SIZE


def test_retrieval_with_llama_index_finds_the_passage_and_then_the_cache(server: Address, tmp_path: Path) -> None:
    if not installed("rag_llama_index.py"):
        pytest.skip("LlamaIndex is not installed; make .venv/llama-index/installed")
    file, document = write_text(tmp_path, 5)
    facts = [document.facts[3]] * 2

    output = run(
        "rag_llama_index.py",
        *of_server(server),
        file,
        *map(question, facts),
        python=interpreter("rag_llama_index.py"),
    )

    first, second = origins(output)
    assert answered(output, facts)
    assert first.keys() == {"recomputed"}
    assert second["device"] > BLOCK_SIZE


def test_a_tool_is_called_with_llama_index() -> None:
    """By a model that would write noise."""
    name = "tools_llama_index.py"
    if not installed(name):
        pytest.skip("LlamaIndex is not installed; make .venv/llama-index/installed")
    with serving(build("llama"), tables(), tokenizer=tool_tokenizer()) as server:
        options = [*of_server(server), "--max-tokens", "200"]  # a token is a byte
        output = run(name, *options, "When is it open?", python=interpreter(name))

    assert re.match(r"opening_hours\(\{'day': '(\w+)'\}\) -> \1: (9 to 19|10 to 16|closed)\n", output)


def test_each_turn_of_a_chat_computes_only_itself(server: Address, tmp_path: Path) -> None:
    document = make_document(6, NUM_TOKENS)
    facts = document.facts[:3]
    turns = "".join(f"{question(fact)}\n" for fact in facts)

    output = run("chat.py", *of_server(server), "--system", document.text, turns=f"{turns}\n")

    answers = re.findall(r"> (.*)\n", output)
    tokens = origins(output)
    assert [answer.strip() for answer in answers] == [fact.word for fact in facts]
    assert tokens[0]["recomputed"] > NUM_TOKENS
    assert all(those["recomputed"] < 3 * BLOCK_SIZE for those in tokens[1:])


def test_a_batch_without_a_server_is_warm_in_its_second_run(tmp_path: Path) -> None:
    model, tokenizer = build_demo_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file, document = write_text(tmp_path, 7)
    facts = list(document.facts[:4])
    options = ["--model", tmp_path / "model", "--store", tmp_path / "store", "--max-tokens", "4"]

    cold = run("batch.py", *options, file, *map(question, facts))
    warm = run("batch.py", *options, file, *map(question, facts))

    assert answered(cold, facts)
    assert answered(warm, facts)
    assert ["disk" in those for those in origins(cold)] == [False] * 4
    assert sum(those.get("disk", 0) for those in origins(warm)) > NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert sum(those["recomputed"] for those in origins(warm)) < 4 * 2 * BLOCK_SIZE


def failed(name: str, *arguments: object, modules: Path | None = None) -> str:
    """Run the example, which must fail, and return what it writes to stderr."""
    done = subprocess.run(
        [str(part) for part in (interpreter(name), EXAMPLES / name, *arguments)],
        input="hello\n",
        env={**os.environ, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(modules or "")},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    return done.stderr


def needed_arguments(name: str, file: Path) -> list[object]:
    other = {"chat.py": [], "tools_llama_index.py": ["Open?"], "tenants.py": ["--key", "none", file, "What?"]}
    if name == "ask_pages.py" and file.exists():
        write_pdf(file.with_suffix(".pdf"), "A page.")
        file = file.with_suffix(".pdf")
    return [] if name == "ray_serve.py" else other.get(name, [file, "What?"])


CLIENTS = [name for name in PROGRAMS if name not in ("batch.py", "ray_serve.py")]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_server_that_is_down_is_one_line(name: str, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip("its package is not installed; make .venv/llama-index/installed")
    file, _ = write_text(tmp_path, 1)

    said = failed(name, "--base-url", "http://127.0.0.1:1/v1", *needed_arguments(name, file))

    assert re.fullmatch(r"no server answers at http://127\.0\.0\.1:1/v1\S*; start one with: kvtier serve .*\n", said)


@pytest.mark.parametrize("name", ["ask_anthropic.py", "ask_document.py", "rag_langchain.py"])
def test_a_model_that_the_server_lacks_is_one_line(name: str, server: Address, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip("its package is not installed; pip install '.[examples]'")
    file, _ = write_text(tmp_path, 1)

    said = failed(name, "--base-url", f"{server.url}/v1", "--model", "absent", *needed_arguments(name, file))

    assert re.fullmatch(r"the server answered 404: the server has no model of that name; use one of .*\n", said)


READERS = [name for name in CLIENTS if name not in ("ask_pages.py", "chat.py", "tools_llama_index.py")]


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read_is_one_line(name: str, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip("its package is not installed; make .venv/llama-index/installed")
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00\x81")

    absent = failed(name, *needed_arguments(name, tmp_path / "absent.txt"))
    unreadable = failed(name, *needed_arguments(name, binary))

    assert absent == f"{tmp_path}/absent.txt: No such file or directory\n"
    assert unreadable == f"{binary}: this is not a text file in UTF-8; give a text file\n"


@pytest.mark.parametrize("name", ["ask_document.py", "ask_pages.py"])
def test_a_pdf_that_cannot_be_read_is_one_line(name: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"%PDF-1.4 and then nothing")

    absent = failed(name, tmp_path / "absent.pdf", "What?")
    said = failed(name, broken, "What?").splitlines()[-1]

    assert absent == f"{tmp_path}/absent.pdf: No such file or directory\n"
    assert said.startswith(f"{broken}: this PDF cannot be read (")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "llama" not in name])
def test_a_package_that_is_not_installed_is_one_line(name: str, tmp_path: Path) -> None:
    first = {"ask_anthropic.py": "anthropic", "batch.py": "kvtier", "rag_langchain.py": "langchain_core"}
    package = {**first, "ray_serve.py": "ray"}.get(name, "openai")
    extra = {"batch.py": "real", "ray_serve.py": "ray"}.get(name, "examples")
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name='{package}')")

    said = failed(name, *needed_arguments(name, tmp_path / "any.txt"), modules=tmp_path)

    assert said == f"the Python package {package} is not installed; run: pip install '.[{extra}]'\n"


def test_a_model_that_a_batch_cannot_load_is_one_line(tmp_path: Path) -> None:
    file, _ = write_text(tmp_path, 1)

    said = failed("batch.py", "--model", tmp_path / "absent.gguf", "--store", tmp_path / "store", file, "What")

    assert said == (
        f"model {tmp_path}/absent.gguf: there is no such file; give a GGUF file, a folder or a name on the hub\n"
    )


def test_tenants_share_nothing_and_find_their_own(tmp_path: Path) -> None:
    model, tokenizer = build_demo_model()
    tokenizer.chat_template = TEMPLATE
    file, document = write_text(tmp_path, 8)
    fact = document.facts[0]
    keys = {"sk-of-ann": "ann", "sk-of-bob": "bob"}
    with serving(model, TABLES, keys, tokenizer) as server:
        given = [part for key in keys for part in ("--key", key)]

        output = run("tenants.py", *of_server(server), *given, file, question(fact))

    tokens = origins(output)
    assert len(re.findall(rf"\s{fact.word}\n", output)) == 4
    assert [those["recomputed"] > NUM_TOKENS for those in tokens] == [True, True, False, False]


def interpreter(name: str) -> Path:
    """LlamaIndex wants an older openai than the tests, so it may have an environment of its own."""
    apart = Path(sys.prefix) / "llama-index" / "bin" / "python"
    is_here = importlib.util.find_spec("llama_index") is not None
    return apart if "llama_index" in name and not is_here else Path(sys.executable)


def installed(name: str) -> bool:
    needed = {"rag_langchain.py": "langchain_openai", "ask_anthropic.py": "anthropic"}.get(name)
    return interpreter(name).exists() and (needed is None or importlib.util.find_spec(needed) is not None)
