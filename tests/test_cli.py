"""The command line, on the tiny model: what it prints, what it asks the engine for, how it fails."""

import logging
import subprocess
import sys

import pytest
import tiny
from typer.testing import CliRunner

from jaxpaged import SamplingParams
from jaxpaged.cli import app

HELLO = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "again"}


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture
def run(llm, monkeypatch):
    """Runs the program on the tiny model; `run.options` are what it was asked to load."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # what the user sets stands
    level = logging.getLogger("jaxpaged").level

    def load(**options):
        run.options = options
        return llm

    def run(*args: str, typed: str = ""):
        with monkeypatch.context() as patch:
            patch.setattr("jaxpaged.llm.LLM", load)
            return CliRunner().invoke(app, args, input=typed)

    yield run
    logging.getLogger("jaxpaged").setLevel(level)


@pytest.fixture
def conversations(llm, monkeypatch):
    """The conversations that were put to the model, each as it was."""
    seen = []
    chat_prompt = llm.chat_prompt
    monkeypatch.setattr(llm, "chat_prompt", lambda messages: seen.append(list(messages)) or chat_prompt(messages))
    return seen


def continued(llm, text: str, **fields) -> str:
    params = SamplingParams(**{"temperature": 0, **fields})
    return text + llm.generate(text, params, use_tqdm=False)[0].outputs[0].text


def as_printed(text: str) -> str:
    return text.replace("\r\n", "\n")


def test_generate_continues_every_prompt(llm, run):
    result = run("generate", "--max-tokens", "6", "the user", "-", typed="the system")
    assert result.exit_code == 0, result.output
    lines = [continued(llm, text, max_tokens=6) for text in ("the user", "the system")]
    assert result.stdout == as_printed("".join(f"{line}\n" for line in lines))
    assert result.stderr == ""
    assert run.options["model"] == "demo"
    assert (run.options["block_size"], run.options["dtype"], run.options["max_num_seqs"]) == (16, "auto", None)


def test_generate_passes_its_options_on(llm, run):
    options = {
        "--model": "here", "--dtype": "float16", "--max-model-len": 99, "--block-size": 32, "--num-kv-blocks": 9,
        "--gpu-memory-utilization": 0.5, "--max-num-seqs": 3, "--max-num-batched-tokens": 44,
    }  # fmt: skip
    sampling = {"--temperature": 0.9, "--top-k": 50, "--top-p": 0.95, "--seed": 8, "--max-tokens": 9}
    flat = [str(x) for pair in (options | sampling).items() for x in pair]
    result = run("generate", *flat, "--no-enable-prefix-caching", "the user")
    asked = {name[2:].replace("-", "_"): value for name, value in options.items()} | {"enable_prefix_caching": False}
    assert run.options == asked
    expected = continued(llm, "the user", temperature=0.9, top_k=50, top_p=0.95, seed=8, max_tokens=9)
    assert result.stdout == as_printed(expected + "\n")


def test_generate_prints_every_completion(llm, run):
    result = run("generate", "--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "6", "the user")
    lines = [continued(llm, "the user", temperature=1, seed=seed, max_tokens=6) for seed in (5, 6, 7)]
    assert len(set(lines)) == 3
    assert result.stdout == as_printed("".join(f"{line}\n" for line in lines))


def test_chat_streams_remembers_and_starts_over(llm, run, conversations):
    result = run(
        "chat", "--max-tokens", "5", "--temperature", "0", "--system", "brief", typed="hello\nagain\n/new\nhello\n\n"
    )
    assert result.exit_code == 0, result.output
    system = {"role": "system", "content": "brief"}
    params = SamplingParams(temperature=0, max_tokens=5)
    first = [system, HELLO]
    answer = "".join(llm.stream(llm.engine.tokenizer.apply_chat_template(first), params))
    assert conversations == [first, [*first, {"role": "assistant", "content": answer}, AGAIN], first]
    assert result.stdout.count(as_printed(answer + "\n")) == 2
    assert result.stdout.startswith(as_printed("> " + answer))


@pytest.mark.parametrize("typed", ["", "\n", "   \n"])
def test_chat_ends_at_an_empty_line_or_the_end_of_input(run, conversations, typed):
    assert run("chat", typed=typed).exit_code == 0
    assert conversations == []


def test_ctrl_c_stops_the_answer_and_what_came_counts(llm, run, conversations, monkeypatch):
    stream, answers = llm.stream, []

    def interrupted(*args):
        pieces = []
        inner = stream(*args)
        answers.append(pieces)
        try:
            for piece in inner:
                pieces.append(piece)
                yield piece
                if len(answers) == 1 and len(pieces) == 2:
                    raise KeyboardInterrupt
        finally:
            inner.close()

    monkeypatch.setattr(llm, "stream", interrupted)
    result = run("chat", "--max-tokens", "8", "--seed", "1", typed="hello\nagain\n\n")
    assert result.exit_code == 0, result.output
    assert len(answers[0]) == 2
    assert conversations[1] == [HELLO, {"role": "assistant", "content": "".join(answers[0])}, AGAIN]
    assert len(answers[1]) > 0


def test_a_conversation_that_grew_too_long_says_so_and_can_start_over(run, conversations):
    result = run("chat", "--max-tokens", "8", "--seed", "1", typed="a" * 150 + "\n/new\nhello\n\n")
    assert result.exit_code == 0, result.output
    assert "tokens fill the context (/new starts over)" in result.stderr
    assert conversations[-1] == [HELLO]


def test_an_answer_uses_the_room_that_the_context_leaves(run, conversations):
    result = run("chat", "--max-tokens", "512", "--seed", "1", typed="hello\n\n")
    assert result.exit_code == 0, result.output
    assert conversations[-1] == [HELLO]
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--temperature", "-1", "a"], "jaxpaged: temperature=-1.0 is out of range"),
        (["generate", "--top-p", "0", "a"], "jaxpaged: top_p=0.0 is out of range"),
        (["generate", "--n", "1025", "a"], "jaxpaged: n=1025 is out of range: give an int, at least 1, at most 1024"),
        (["chat", "--temperature", "nan"], "jaxpaged: temperature=nan is out of range"),
        (["generate", ""], "jaxpaged: prompt 0: prompt='' has no tokens"),
        (
            ["generate", "a", "--max-tokens", "500"],
            "jaxpaged: prompt 0: the prompt's 1 tokens + max_tokens=500 are 501",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_2(run, args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("args", [["generate", "a"], ["chat"]])
def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(monkeypatch, args):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    result = CliRunner().invoke(app, [*args, "--model", "/nowhere"])
    assert result.exit_code == 2
    assert result.stderr.startswith("jaxpaged: model='/nowhere': ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [["--frobnicate"], ["generate", "--dtype", "int4", "a"], ["generate"]])
def test_what_the_command_line_does_not_know_is_exit_code_2(run, args):
    assert run(*args).exit_code == 2


def test_help_lists_commands_and_options_with_their_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    top = CliRunner().invoke(app, ["--help"]).output
    assert "generate" in top
    assert "chat" in top
    text = CliRunner().invoke(app, ["generate", "--help"]).output
    for option, default in {
        "--model": "[default: demo]",
        "--dtype": "[default: auto]",
        "--block-size": "[default: 16]",
        "--gpu-memory-utilization": "[default: 0.9]",
        "--temperature": "[default: 0.0]",
        "--top-p": "[default: 1.0]",
        "--max-tokens": "[default: 128]",
        "--max-model-len": "the model's own limit if not given",
        "--num-kv-blocks": "as many as fit if not given",
        "--max-num-seqs": "256 if not given, 32 on a CPU",
        "--max-num-batched-tokens": "2048 if not given, 256 on a CPU",
        "--seed": "Makes sampling reproducible",
        "--top-k": "0 = all",
    }.items():
        (line,) = (line for line in text.splitlines() if f" {option} " in line)
        assert default in line


def test_help_does_not_wait_for_jax():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['jaxpaged', '--help']\n"
        "try: runpy.run_module('jaxpaged.cli', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'jax', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
