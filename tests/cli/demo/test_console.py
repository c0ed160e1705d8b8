import shlex
import sys

from bert_jax.cli.demo import console


def test_commands_are_quoted_for_a_shell(capsys):
    console.verdict(True, [["fill-mask", "my work/run", "a [MASK]"]], "Read on.")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "fill-mask" in line)
    assert shlex.split(line)[-3:] == ["fill-mask", "my work/run", "a [MASK]"]


def test_the_program_is_named_so_that_a_shell_finds_it(monkeypatch, tmp_path):
    script = tmp_path / "env" / "bin" / "bert-jax"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert console._program() == ["env/bin/bert-jax"]
    monkeypatch.setenv("PATH", str(script.parent))
    assert console._program() == ["bert-jax"]
    monkeypatch.setenv("PATH", "/nowhere")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert console._program() == [str(script)]
    script.unlink()
    assert console._program() == [str(script.with_name("python")), "-m", "bert_jax.cli"]
