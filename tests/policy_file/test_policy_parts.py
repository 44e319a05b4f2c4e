"""A policy in several parts: included files, named sets of rules, stages of a pipeline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mindspore import nn

from hyper_parallel import PolicyError, apply_policy, load_policy

STAGES = {
    "version": 1,
    "rules": [{"cells": "layers.*", "policy": "must_recompute"}],
    "stages": [{"rules": [{"cells": "layers.0", "policy": "must_swap"}]}, {}],
}


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    """Write several files, and give the path of the first."""

    def write_files(**texts: str) -> Path:
        for name, text in texts.items():
            path = tmp_path / (name.replace("__", "/") + ".yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / f"{next(iter(texts))}.yaml"

    return write_files


def message(source: Any, **options: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source, **options)
    return str(caught.value)


def decided(net: nn.Cell, source: Any, **options: Any) -> dict[str, tuple[str, str]]:
    return {row.path: (row.policy_text, row.why) for row in load_policy(source, **options).resolve(net)}


class TestInclude:
    def test_rules_of_an_included_file_come_first(self, gpt: nn.Cell, files: Callable[..., Path]) -> None:
        main = files(
            main="version: 1\ninclude: base.yaml\nrules: [{cells: layers.0, policy: must_swap}]\n",
            base="version: 1\nrules: [{cells: layers.*, policy: must_save}]\n",
        )
        found = decided(gpt, main)
        assert found["layers.0"] == ("must_swap", "rule 1")
        assert found["layers.1"] == ("must_save", "base.yaml, rule 1")

    def test_of_settings_the_later_file_wins_key_by_key(self, files: Callable[..., Path]) -> None:
        main = files(
            main="version: 1\ninclude: [a.yaml, b.yaml]\nswap: {window: 4MiB}\n",
            a="version: 1\ndefault: must_swap\nswap: {window: 1MiB, pending: 1MiB, tier: host}\n",
            b="version: 1\ndefault: must_recompute\nswap: {pending: 2MiB}\n",
        )
        found = load_policy(main).to_plain_values()
        assert found["default"] == "must_recompute"
        assert found["swap"] == {"tier": "host", "window": 4 * 2**20, "pending": 2 * 2**20}

    def test_paths_are_relative_to_the_file_that_includes(self, gpt: nn.Cell, files: Callable[..., Path]) -> None:
        main = files(
            main="version: 1\ninclude: sub/a.yaml\n",
            sub__a="version: 1\ninclude: b.yml\n",
        )
        (main.parent / "sub" / "b.yml").write_text("version: 1\nrules: [{cells: head, policy: must_save}]\n")
        assert decided(gpt, main) == {"head": ("must_save", "sub/b.yml, rule 1")}

    def test_a_file_that_two_include_is_read_once(self, files: Callable[..., Path]) -> None:
        main = files(
            main="version: 1\ninclude: [a.yaml, b.yaml]\n",
            a="version: 1\ninclude: c.yaml\n",
            b="version: 1\ninclude: c.yaml\n",
            c="version: 1\nrules: [{cells: head, policy: must_save}]\n",
        )
        assert len(load_policy(main).to_plain_values()["rules"]) == 1

    def test_a_cycle_is_named(self, files: Callable[..., Path]) -> None:
        main = files(main="version: 1\ninclude: a.yaml\n", a="version: 1\ninclude: main.yaml\n")
        assert (
            "a.yaml:2:10: include, item 1: got 'main.yaml', which would never end: main.yaml -> a.yaml -> main.yaml"
        ) in message(main)

    def test_a_file_that_includes_itself_is_named(self, files: Callable[..., Path]) -> None:
        assert "main.yaml -> main.yaml" in message(files(main="version: 1\ninclude: ./main.yaml\n"))

    def test_mistakes_of_all_files_are_told_together(self, files: Callable[..., Path]) -> None:
        main = files(
            main="version: 1\ninclude: [a.yaml, b.yaml, none.yaml]\ndefault: keep\n",
            a="version: 1\nrules: [{cells: head}]\n",
            b="version: [1\n",
        )
        found = message(main)
        assert found.startswith("main.yaml has 4 errors:\n")
        for place in ("a.yaml:2:9: rule 1, policy is missing", "b.yaml:2:1: malformed YAML", "main.yaml:3:10: default"):
            assert place in found
        assert "main.yaml:2:27: include, item 3: got 'none.yaml', but policy file" in found

    @pytest.mark.parametrize("path", ["/etc/passwd", "/etc/a.yaml", "a.txt", "../secret", "~/a.json", ""])
    def test_only_relative_paths_of_yaml_files_are_read(self, files: Callable[..., Path], path: str) -> None:
        found = message(files(main=f"version: 1\ninclude: '{path}'\n"))
        assert f"got {path!r}, expected a path relative to main.yaml, of a file that ends in .yaml or .yml" in found

    def test_what_includes_too_many_files_ends(self, files: Callable[..., Path]) -> None:
        chain = {f"f{n}": f"version: 1\ninclude: f{n + 1}.yaml\n" for n in range(60)}
        assert "one file too many: at most 50 are read" in message(files(**chain))

    def test_a_dict_includes_nothing(self) -> None:
        assert "include, item 1: got 'a.yaml', but a dict has no folder" in message({"version": 1, "include": "a.yaml"})

    def test_a_plan_of_several_files_is_written_as_one(self, gpt: nn.Cell, files: Callable[..., Path]) -> None:
        main = files(
            main="version: 1\ninclude: a.yaml\nrules: [{use: heads}]\n"
            "stages: [{rules: [{cells: layers.1, policy: must_save}]}]\n",
            a="version: 1\nrule_sets: {heads: [{cells: head, policy: must_swap}]}\n"
            "rules: [{cells: layers.*, policy: must_save}]\nprefetch: [{load: layers.0, at: head}]\n"
            "stages: [{rules: [{cells: layers.0, policy: must_swap}]}]\n",
        )
        written = main.with_name("written.yaml")
        written.write_text(load_policy(main).to_yaml())
        assert {path: policy for path, (policy, _) in decided(gpt, written, stage=0).items()} == {
            path: policy for path, (policy, _) in decided(gpt, main, stage=0).items()
        }
        assert "include" not in written.read_text()


class TestRuleSets:
    SETS: ClassVar[Any] = {
        "heads": [{"cells": "head", "policy": "must_swap"}],
        "all": [{"use": "heads"}, {"cells": "embedding", "policy": "must_save"}],
    }

    def document(self, *rules: Any, **others: Any) -> dict[str, Any]:
        return {"version": 1, "rule_sets": self.SETS, "rules": list(rules), **others}

    def test_a_set_stands_for_its_rules_where_it_is_used(self, gpt: nn.Cell) -> None:
        later = {"cells": "head", "policy": "must_save"}
        assert decided(gpt, self.document({"use": "all"})) == {
            "embedding": ("must_save", "set all, rule 2"),
            "head": ("must_swap", "set heads, rule 1"),
        }
        assert decided(gpt, self.document({"use": "heads"}, later))["head"] == ("must_save", "rule 2")
        assert decided(gpt, self.document(later, {"use": "heads"}))["head"] == ("must_swap", "set heads, rule 1")

    def test_an_unknown_set_is_told_the_closest(self) -> None:
        assert "rule 1, use: got 'head', expected a set of rule_sets; did you mean 'heads'?" in message(
            self.document({"use": "head"})
        )

    def test_an_unknown_set_is_told_beside_other_mistakes(self) -> None:
        found = message({"version": 1, "default": 3, "rules": [{"use": "x"}], "stages": [{"rules": [{"use": "y"}]}]})
        assert "rule 1, use: got 'x', expected a set of rule_sets; known are none" in found
        assert "stage 0, rule 1, use: got 'y'" in found
        assert "default: got 3" in found

    def test_sets_that_use_each_other_are_named(self) -> None:
        sets = {"a": [{"use": "b"}], "b": [{"use": "a"}]}
        assert "rule set b, rule 1, use: got 'a', which would never end: a -> b -> a" in message(
            {"version": 1, "rule_sets": sets, "rules": [{"use": "a"}]}
        )

    def test_sets_that_multiply_end(self) -> None:
        sets = {f"s{n}": [{"use": f"s{n + 1}"}] * 10 for n in range(15)} | {"s15": []}
        assert "more than 10,000 rules" in message({"version": 1, "rule_sets": sets, "rules": [{"use": "s0"}]})

    def test_sets_in_sets_in_sets_end(self) -> None:
        sets = {f"s{n}": [{"use": f"s{n + 1}"}] for n in range(5000)} | {"s5000": []}
        assert "which is a set in a set in a set, more than 20 times" in message(
            {"version": 1, "rule_sets": sets, "rules": [{"use": "s0"}]}
        )

    def test_a_set_that_nothing_uses_is_noted(self, gpt: nn.Cell) -> None:
        assert "note: rule set all has no effect: nothing uses it" in load_policy(
            self.document({"use": "heads"})
        ).describe(gpt)

    def test_a_mistake_in_a_set_is_placed(self) -> None:
        sets = {"a": [{"cells": "head", "policy": "keep"}], "b": 3, "c": [{"use": "a", "policy": "must_save"}]}
        found = message({"version": 1, "rule_sets": sets})
        assert "rule set a, rule 1, policy: got 'keep'" in found
        assert "rule set b: got 3, expected a list of rules" in found
        assert (
            "rule set c, rule 1, policy: unknown key (its value: 'must_save'); an entry with `use` stands for" in found
        )

    def test_a_set_of_two_files_is_an_error(self, files: Callable[..., Path]) -> None:
        text = "rule_sets: {a: [{cells: head, policy: must_save}]}\nrules: [{use: a}]\n"
        main = files(main="version: 1\ninclude: b.yaml\n" + text, b="version: 1\n" + text)
        assert "main.yaml:3:16: rule set a: b.yaml has a set of this name, too" in message(main)


class TestStages:
    def test_rules_of_a_stage_come_after_the_common_ones(self, gpt: nn.Cell) -> None:
        assert decided(gpt, STAGES, stage=0)["layers.0"] == ("must_swap", "stage 0, rule 1")
        assert decided(gpt, STAGES, stage=1)["layers.0"] == ("must_recompute", "rule 1")

    def test_applying_takes_the_stage(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, STAGES, stage=0)
        assert plan.stage == 0
        assert plan.describe().startswith("dict (stage 0): applied to Gpt")
        assert plan.rows[0].policy_text == "must_swap"

    def test_a_loaded_plan_takes_the_stage_when_it_is_applied(self, gpt: nn.Cell, new_gpt: type[nn.Cell]) -> None:
        plan = load_policy(STAGES)
        assert apply_policy(gpt, plan, stage=0).rows[0].policy_text == "must_swap"
        assert apply_policy(new_gpt(), plan, stage=1).rows[0].policy_text == "must_recompute"

    def test_a_removed_plan_may_be_applied_to_another_stage(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, load_policy(STAGES, stage=0))
        plan.remove()
        assert apply_policy(gpt, plan) is plan
        plan.remove()
        with pytest.raises(PolicyError, match="was loaded for stage 0, but is applied to 1"):
            apply_policy(gpt, plan, stage=1)

    def test_without_a_stage_it_is_an_error(self, gpt: nn.Cell) -> None:
        with pytest.raises(PolicyError, match="dict has rules for 2 stages, 0 to 1, but no stage was given"):
            apply_policy(gpt, STAGES)

    @pytest.mark.parametrize("stage", [2, 10**9])
    def test_a_stage_that_is_not_there_is_an_error(self, stage: int) -> None:
        assert message(STAGES, stage=stage) == f"dict has rules for 2 stages, 0 to 1, but the stage is {stage}"

    def test_a_negative_stage_is_an_error(self) -> None:
        assert "a stage is a whole number from 0, but got -1" in message(STAGES, stage=-1)

    @pytest.mark.parametrize("stage", [True, "0", 1.0])
    def test_a_stage_of_another_type_is_a_type_error(self, stage: Any) -> None:
        with pytest.raises(TypeError, match="a stage is a whole number from 0"):
            load_policy(STAGES, stage=stage)

    @pytest.mark.parametrize(("stages", "which"), [(1, "more"), (3, "fewer")])
    def test_a_list_that_is_longer_or_shorter_than_the_pipeline_is_an_error(
        self, gpt: nn.Cell, stages: int, which: str
    ) -> None:
        expected = (
            f"dict has rules for 2 stages, {which} than the pipeline, which has {stages}; give one entry per stage"
        )
        assert expected in message(STAGES, stages=stages)
        with pytest.raises(PolicyError, match=f"2 stages, {which} than"):
            apply_policy(gpt, load_policy(STAGES), stage=0, stages=stages)

    def test_a_list_as_long_as_the_pipeline_is_fine(self, gpt: nn.Cell) -> None:
        assert apply_policy(gpt, STAGES, stage=0, stages=2).applied
        assert load_policy({"version": 1}, stages=4)

    def test_a_pipeline_has_a_stage(self) -> None:
        assert "the number of stages is a whole number from 1, but got 0" in message(STAGES, stages=0)

    def test_to_a_file_without_stages_the_stage_makes_no_difference(self, gpt: nn.Cell) -> None:
        assert decided(gpt, {"version": 1}, stage=7) == {}

    def test_before_it_is_applied_a_plan_lists_all_stages(self) -> None:
        assert load_policy(STAGES).describe().splitlines()[1:] == [
            "rule 1           layers.*        must_recompute",
            "stage 0, rule 1  layers.0        must_swap",
            "default          any other cell  prefer_save",
        ]

    def test_a_rule_of_another_stage_need_not_match(self, gpt: nn.Cell) -> None:
        stages = {"version": 1, "stages": [{}, {"rules": [{"cells": "nowhere", "policy": "must_save"}]}]}
        assert decided(gpt, stages, stage=0) == {}

    @pytest.mark.parametrize(
        ("stages", "expected"),
        [
            ([], "stages: got [], expected a list with one mapping per stage"),
            ({}, "stages: got {}, expected a list with one mapping per stage"),
            ([3], "stage 0: got 3, expected a mapping with rules"),
            ([{}, {"rule": []}], "stage 1, rule: unknown key (its value: []); did you mean 'rules'?"),
            ([{"rules": [{"cells": "a", "policy": 1}]}], "stage 0, rule 1, policy: got 1"),
        ],
    )
    def test_wrong_stages_are_errors(self, stages: Any, expected: str) -> None:
        assert expected in message({"version": 1, "stages": stages})

    def test_files_with_other_numbers_of_stages_contradict(self, files: Callable[..., Path]) -> None:
        main = files(main="version: 1\ninclude: a.yaml\nstages: [{}, {}]\n", a="version: 1\nstages: [{}]\n")
        assert "a.yaml:2:9: stages: it has 1 stages, but another file has 2" in message(main)
