"""Real spellings of other engines and checkpoints: read, written, read again, or refused."""

import dataclasses
import json

import pytest

from flashskip import SkipSoftmaxConfig
from flashskip.geometry import Geometry
from flashskip.policy import Coefficients

# -- TensorRT-LLM

TENSORRT_LLM = [
    (
        {"algorithm": "skip_softmax", "threshold_scale_factor": 1000.0},
        {"threshold_scale_factor": 1000.0},
    ),
    (
        {
            "algorithm": "skip_softmax",
            "threshold_scale_factor": {"prefill": 1000.0, "decode": 500.0},
        },
        {"threshold_scale_factor": {"prefill": 1000.0, "decode": 500.0}},
    ),
    (
        {"algorithm": "skip_softmax", "target_sparsity": {"prefill": 0.5, "decode": 0.3}},
        {"target_sparsity": {"prefill": 0.5, "decode": 0.3}},
    ),
    (
        {"algorithm": "skip_softmax", "target_sparsity": 0.75, "disabled_until_timestep": 0.86},
        {"target_sparsity": 0.75, "disabled_until_timestep": 0.86},
    ),
]


@pytest.mark.parametrize(("spec", "fields"), TENSORRT_LLM)
def test_tensorrt_llm_round_trip(spec, fields):
    config = SkipSoftmaxConfig.from_tensorrt_llm({"sparse_attention_config": spec})
    assert config == SkipSoftmaxConfig(**fields)
    assert config.to_tensorrt_llm() == {"sparse_attention_config": spec}
    assert SkipSoftmaxConfig.from_tensorrt_llm(config.to_tensorrt_llm()) == config


def test_tensorrt_llm_yaml_file(tmp_path):
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "extra_llm_api_options.yaml"
    file.write_text(
        "attn_backend: TRTLLM\n"
        "sparse_attention_config:\n"
        "  algorithm: skip_softmax\n"
        "  threshold_scale_factor:\n"
        "    prefill: 1000.0\n"
        "    decode: 500.0\n"
    )
    config = SkipSoftmaxConfig.from_tensorrt_llm(file)
    assert config.options("decode")["skip_softmax_threshold_scale_factor"] == 500.0
    file.write_text(yaml.safe_dump(config.to_tensorrt_llm()))
    assert SkipSoftmaxConfig.from_tensorrt_llm(file) == config


def test_tensorrt_llm_visual_gen_nests_once_more():
    spec = {"backend": "TRTLLM", "sparse_attention_config": TENSORRT_LLM[0][0]}
    config = SkipSoftmaxConfig.from_tensorrt_llm({"model": "wan", "attention_config": spec})
    assert config == SkipSoftmaxConfig(threshold_scale_factor=1000.0)


def test_tensorrt_llm_zero_and_defaults_are_dense():
    spec = {"algorithm": "skip_softmax", "threshold_scale_factor": 0.0, "target_sparsity": None}
    assert SkipSoftmaxConfig.from_tensorrt_llm(spec) == SkipSoftmaxConfig()
    spec["threshold_scale_factor"] = {"prefill": 8.0, "decode": 0.0}
    spec["uses_spcompress"] = False
    config = SkipSoftmaxConfig.from_tensorrt_llm(spec)
    assert config.options("decode") == {}
    assert config.options("prefill")["skip_softmax_threshold_scale_factor"] == 8.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"algorithm": "rocket"}, "algorithm is 'rocket'; expected 'skip_softmax'"),
        ({"threshold_scale_factor": 1.0}, "algorithm: skip_softmax among them"),
        (
            {"algorithm": "skip_softmax", "treshold_scale_factor": 1.0},
            "has the key 'treshold_scale_factor'; expected only .*threshold_scale_factor",
        ),
        ({"algorithm": "skip_softmax", "uses_spcompress": True}, "'uses_spcompress'"),
        (
            {"algorithm": "skip_softmax", "threshold_scale_factor": -5.0},
            "threshold_scale_factor is -5.0",
        ),
        (
            {"algorithm": "skip_softmax", "threshold_scale_factor": 5.0, "target_sparsity": 0.5},
            "threshold_scale_factor and target_sparsity are both given",
        ),
    ],
)
def test_tensorrt_llm_refusals(spec, message):
    with pytest.raises(ValueError, match=message):
        SkipSoftmaxConfig.from_tensorrt_llm({"sparse_attention_config": spec})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"threshold": 0.1}, "threshold"),
        ({"threshold": 0.0}, "threshold"),
        ({"threshold_scale_factor": 5.0, "order": "ascending"}, "order"),
        ({"threshold_scale_factor": 5.0, "overflow": "dense"}, "overflow"),
        ({"threshold_scale_factor": 5.0, "ignore": ["x"]}, "ignore"),
        ({"components": {"transformer": SkipSoftmaxConfig()}}, "components"),
    ],
)
def test_what_tensorrt_llm_cannot_say_is_refused(fields, name):
    with pytest.raises(ValueError, match=rf"^{name} is "):
        SkipSoftmaxConfig(**fields).to_tensorrt_llm()


# -- vLLM-Omni

VLLM_OMNI = [
    (
        {"threshold": 0.05, "disabled_until_timestep": 0.93},
        {"threshold": 0.05, "disabled_until_timestep": 0.93},
    ),
    (
        {"target_sparsity": 0.5, "disabled_until_timestep": 0.0},
        {"target_sparsity": 0.5, "overflow": "clamp"},
    ),
]


@pytest.mark.parametrize(("spec", "fields"), VLLM_OMNI)
def test_vllm_omni_round_trip(spec, fields):
    whole = {"default": {"backend": "TRTLLM_ATTN", "skip_softmax": spec}}
    config = SkipSoftmaxConfig.from_vllm_omni(whole)
    assert config == SkipSoftmaxConfig(**fields)
    assert config.to_vllm_omni() == {"skip_softmax": spec}
    assert SkipSoftmaxConfig.from_vllm_omni(config.to_vllm_omni()) == config
    assert SkipSoftmaxConfig.from_vllm_omni(spec) == config


def test_vllm_omni_json_file_and_roles(tmp_path):
    file = tmp_path / "attention.json"
    own = {"backend": "TRTLLM_ATTN", "skip_softmax": {"threshold": 0.2}}
    default = {"backend": "TRTLLM_ATTN", "skip_softmax": {"threshold": 0.1}}
    dense = {"backend": "FLASH_ATTN"}
    file.write_text(json.dumps({"default": default, "per_role": {"self": own, "cross": dense}}))
    thresholds = [
        SkipSoftmaxConfig.from_vllm_omni(file, role=role).threshold
        for role in ("self", "joint", None, "cross")
    ]
    assert thresholds == [0.2, 0.1, 0.1, None]  # an entry replaces the whole default


def test_vllm_omni_gate_of_zero_is_no_gate():
    spec = {"threshold": 0.1, "disabled_until_timestep": 0.0}
    assert SkipSoftmaxConfig.from_vllm_omni(spec).disabled_until_timestep is None
    with pytest.raises(ValueError, match=r"disabled_until_timestep is 0\.0, which means no gate"):
        SkipSoftmaxConfig(threshold=0.1, disabled_until_timestep=0.0).to_vllm_omni()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"threshold": 0.1, "target_sparsity": 0.5}, "threshold and target_sparsity"),
        ({"treshold": 0.1}, "has the key 'treshold'; expected only .*threshold"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"target_sparsity": -0.5}, "target_sparsity is -0.5"),
        ({"threshold": 0.5, "disabled_until_timestep": 2}, "disabled_until_timestep is 2"),
    ],
)
def test_vllm_omni_refusals(spec, message):
    with pytest.raises(ValueError, match=message):
        SkipSoftmaxConfig.from_vllm_omni({"skip_softmax": spec})


def test_what_vllm_omni_cannot_say_is_refused():
    with pytest.raises(ValueError, match="threshold_scale_factor is given"):
        SkipSoftmaxConfig(threshold_scale_factor=5.0).to_vllm_omni()
    with pytest.raises(ValueError, match="overflow is 'dense', which vLLM-Omni"):
        SkipSoftmaxConfig(target_sparsity=0.5, overflow="dense").to_vllm_omni()
    with pytest.raises(ValueError, match=r"threshold is \{'prefill': 0.1\}"):
        SkipSoftmaxConfig(threshold={"prefill": 0.1}).to_vllm_omni()


# -- checkpoints

FORMULA = {"formula": "a * exp(b * target_sparsity)"}
LLM = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "sparse_attention_config": {
        "config_groups": {
            "group_0": {
                "algorithm": "skip_softmax",
                "targets": ["Qwen3MoeAttention"],
                "ignore": ["model.layers.0.self_attn", "*.layers.1.*"],
                "threshold_scale_factor": {
                    "formula": "a * exp(b * target_sparsity)",
                    "prefill": {"a": 7.93, "b": 8.61},
                    "decode": {"a": 0.12, "b": 9.85},
                },
                "target_sparsity": {"prefill": 0.5, "decode": 0.3},
            }
        },
        "producer": {"name": "modelopt", "version": "0.45.0"},
    },
}
WAN = {
    "_class_name": "WanTransformer3DModel",
    "sparse_attention_config": {
        "config_groups": {
            "group_0": {
                "algorithm": "skip_softmax",
                "targets": ["WanAttention"],
                "ignore": ["blocks.0.attn1"],
                "threshold_scale_factor": {
                    "formula": "a * exp(b * target_sparsity)",
                    "coefficients": {"a": 2822.6209952221557, "b": 4.388250623520793},
                },
                "target_sparsity": 0.7,
                "disabled_until_timestep": 0.93,
            }
        }
    },
}


def group_of(config):
    return config["sparse_attention_config"]["config_groups"]["group_0"]


def with_group(config, **changes):
    """A checkpoint with other keys in its group; None removes a key."""
    group = {k: v for k, v in {**group_of(config), **changes}.items() if v is not None}
    return {**config, "sparse_attention_config": {"config_groups": {"group_0": group}}}


@pytest.mark.parametrize("checkpoint", [LLM, WAN])
def test_checkpoint_round_trip(checkpoint):
    config = SkipSoftmaxConfig.from_checkpoint(checkpoint)
    written = config.to_checkpoint()
    assert group_of(written) == group_of(checkpoint)
    assert SkipSoftmaxConfig.from_checkpoint(json.loads(json.dumps(written))) == config


def test_checkpoint_values():
    config = SkipSoftmaxConfig.from_checkpoint(LLM)
    assert config.targets == ("Qwen3MoeAttention",)
    assert config.overflow is None
    assert config.options("prefill", "model.layers.0.self_attn") == {}
    assert config.options("decode", "model.layers.1.self_attn") == {}
    with pytest.warns(
        UserWarning, match=r"measured in \(order ascending.*used \(order diagonal_sink"
    ):
        options = config.options("prefill", "model.layers.2.self_attn")
    assert options["skip_softmax_threshold_scale_factor"] == pytest.approx(587.18, rel=1e-3)
    # Published curves are those of 128 x 128 votes, ascending; the plan of a kernel says so.
    with pytest.warns(UserWarning, match=r"of decode were measured in .*used \(seeded\)"):
        config.options("decode", "model.layers.2.self_attn")
    with pytest.warns(UserWarning, match="ascending, 1 rows of 1 head x 128 keys"):
        config.check("decode", Geometry.decode(8))


def test_diffusion_components_clamp_by_default():
    config = SkipSoftmaxConfig.from_checkpoint(WAN)
    assert config.overflow == "clamp"
    assert config.disabled_until_timestep == 0.93
    assert config.coefficients.factor(0.7) / 75_600 == pytest.approx(0.806, abs=5e-4)
    assert SkipSoftmaxConfig.from_checkpoint(LLM).overflow is None
    user = SkipSoftmaxConfig(target_sparsity=0.7, overflow="dense")
    assert SkipSoftmaxConfig.from_checkpoint(WAN, user=user).overflow == "dense"


@pytest.mark.parametrize(
    "factor",
    [
        {"formula": "exp(log_a + b * target_sparsity)", "prefill": {"log_a": -10.0, "b": 2.0}},
        {"formula": "a*exp(b*target_sparsity)", "prefill": {"log_a": -10.0, "b": 2.0}},
        {**FORMULA, "prefill": {"a": 4.5399929762484854e-05, "b": 2.0}},
        {
            **FORMULA,
            "prefill": {
                "a": 4.5399929762484854e-05, "log_a": -10.0, "b": 2.0, "fit_logspace": True,
            },
        },
    ],
)  # fmt: skip
def test_spellings_of_the_coefficients(factor):
    config = SkipSoftmaxConfig.from_checkpoint(with_group(LLM, threshold_scale_factor=factor))
    assert config.coefficients["prefill"].a == pytest.approx(4.5399929762484854e-05, rel=1e-12)
    assert config.coefficients["prefill"].b == 2.0
    assert "decode" not in config.coefficients


def test_older_spellings():
    old = {
        "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["Attention"]}},
        "threshold_scale_factor": {
            "formula": "a * exp(b * target_sparsity)",
            "prefill": {"a": 1.0, "b": 2.0},
        },
        "producer": {"name": "modelopt", "version": "0.40"},
    }
    config = SkipSoftmaxConfig.from_checkpoint({"sparse_attention_config": old})
    assert config.coefficients["prefill"].b == 2.0
    ignored = with_group(LLM, ignore=None, disabled_layers=["blocks.0"])
    assert SkipSoftmaxConfig.from_checkpoint(ignored).ignore == ("blocks.0",)


def test_observed_range_of_other_calibrators_is_kept():
    curve = {"a": 1.0, "b": 2.0, "min_observed_sparsity": 0.15, "max_observed_sparsity": 0.85}
    config = SkipSoftmaxConfig.from_checkpoint(
        with_group(LLM, threshold_scale_factor={**FORMULA, "prefill": curve}, target_sparsity=0.9)
    )
    with pytest.raises(ValueError, match=r"target_sparsity is 0.9.*0.15 to 0.85"):
        config.options("prefill", "x")


MALICIOUS = "__import__('os').system('touch pwned') * target_sparsity"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"threshold_scale_factor": {"formula": MALICIOUS, "prefill": {"a": 1, "b": 1}}},
            "formula",
        ),
        (
            {"threshold_scale_factor": {"formula": "a * b ** target_sparsity", "coefficients": {}}},
            r"formula is 'a \* b \*\* target_sparsity'; expected one of .* Pass threshold",
        ),
        (
            {"threshold_scale_factor": {**FORMULA, "prefill": {"a": 1.0}}},
            r"\['prefill'\] is .*\{a, b\}",
        ),
        (
            {"threshold_scale_factor": {**FORMULA, "prefill": {"b": 1.0}}},
            r"\['prefill'\] is .*\{a, b\}",
        ),
        ({"threshold_scale_factor": {**FORMULA, "prefill": {}}}, r"\['prefill'\] is"),
        ({"threshold_scale_factor": {**FORMULA, "prefill": 5.0}}, r"\['prefill'\] is 5.0"),
        ({"threshold_scale_factor": {**FORMULA, "prefill": {"a": -1.0, "b": 1.0}}}, "a is -1.0"),
        (
            {"threshold_scale_factor": {**FORMULA, "prefill": {"a": "1", "b": 1.0}}},
            r"\['a'\] is '1'",
        ),
        ({"threshold_scale_factor": {**FORMULA, "prefill": {"log_a": 9999.0, "b": 1.0}}}, "log_a"),
        (
            {"threshold_scale_factor": {**FORMULA, "prefill": {"a": 5.0, "log_a": 0.0, "b": 1.0}}},
            "contradict each other",
        ),
        (
            {"threshold_scale_factor": {**FORMULA, "prefill": {"a": 1.0, "b": 1.0, "c": 2.0}}},
            r"\['prefill'\] is",
        ),
        ({"threshold_scale_factor": FORMULA}, "formula, and"),
        ({"threshold_scale_factor": {"prefill": {"a": 7.93, "b": 8.61}}}, "formula is None"),
        ({"threshold_scale_factor": {**FORMULA, "video": {"a": 1.0, "b": 1.0}}}, "video"),
        (
            {
                "threshold_scale_factor": {
                    **FORMULA,
                    "coefficients": {"a": 1.0, "b": 1.0},
                    "prefill": {"a": 1.0, "b": 1.0},
                }
            },
            "coefficients and phases",
        ),
        ({"threshold_scale_factor": 1000.0}, "threshold_scale_factor is 1000.0"),
        ({"threshold_scale_factor": None}, "threshold_scale_factor is None"),
        ({"algorithm": "vsa"}, "config_groups has 0 groups"),
        ({"skip": True}, "has the key 'skip'"),
        ({"target_sparsity": 1.5}, "target_sparsity is 1.5"),
        ({"disabled_until_timestep": -0.1}, "disabled_until_timestep is -0.1"),
        (
            {"initial_disabled_steps": 8},
            "initial_disabled_steps is 8 without disabled_until_timestep",
        ),
    ],
)
def test_checkpoint_refusals_name_the_key(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=message):
        SkipSoftmaxConfig.from_checkpoint(with_group(LLM, **changes))
    assert not list(tmp_path.iterdir())  # no text of a file was evaluated


def test_two_skip_groups_and_none_are_refused():
    groups = {"group_0": group_of(LLM), "group_1": group_of(LLM)}
    with pytest.raises(ValueError, match="config_groups has 2 groups"):
        SkipSoftmaxConfig.from_checkpoint({"sparse_attention_config": {"config_groups": groups}})
    with pytest.raises(ValueError, match=r"no sparse_attention_config.*pass threshold"):
        SkipSoftmaxConfig.from_checkpoint({"architectures": ["LlamaForCausalLM"]})


# -- precedence


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, {"target_sparsity": {"prefill": 0.5, "decode": 0.3}}),
        ({"target_sparsity": 0.6}, {"target_sparsity": 0.6}),
        ({"threshold": 0.01}, {"threshold": 0.01}),
        (
            {"threshold_scale_factor": {"prefill": 9.0}},
            {"threshold_scale_factor": {"prefill": 9.0}},
        ),
    ],
)
def test_user_comes_before_checkpoint(user, expected):
    config = SkipSoftmaxConfig.from_checkpoint(LLM, user=SkipSoftmaxConfig(**user))
    sources = ("threshold", "threshold_scale_factor", "target_sparsity")
    found = {name: getattr(config, name) for name in sources}
    assert found == {**dict.fromkeys(sources), **expected}


def test_user_adds_to_ignore_and_replaces_gate_and_order():
    user = SkipSoftmaxConfig(ignore=["blocks.39"], disabled_until_timestep=1.0, order="ascending")
    config = SkipSoftmaxConfig.from_checkpoint(WAN, user=user)
    assert config.ignore == ("blocks.0.attn1", "blocks.39")
    assert config.disabled_until_timestep == 1.0
    assert config.order == "ascending"
    assert config.target_sparsity == 0.7


def test_a_users_gate_stands_in_for_a_number_of_steps():
    changes = {"initial_disabled_steps": 8, "disabled_until_timestep": None}
    user = SkipSoftmaxConfig(disabled_until_timestep=0.9)
    config = SkipSoftmaxConfig.from_checkpoint(with_group(WAN, **changes), user=user)
    assert config.disabled_until_timestep == 0.9
    both = with_group(WAN, initial_disabled_steps=8)
    assert SkipSoftmaxConfig.from_checkpoint(both).disabled_until_timestep == 0.93


def test_vllm_omni_takes_coefficients_and_ignore_alone_from_the_checkpoint():
    def read(spec):
        return SkipSoftmaxConfig.from_vllm_omni({"skip_softmax": spec}, checkpoint=WAN)

    config = read({"target_sparsity": 0.5})
    assert config.target_sparsity == 0.5
    assert config.disabled_until_timestep is None
    assert config.ignore == ("blocks.0.attn1",)
    assert config.coefficients.a == 2822.6209952221557
    assert read({"threshold": 0.1}).options("prefill", "x") == {"skip_softmax_threshold": 0.1}
    assert read({}) == SkipSoftmaxConfig()


# -- files


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def test_model_folder_and_file(tmp_path):
    write(tmp_path / "config.json", LLM)
    expected = SkipSoftmaxConfig.from_checkpoint(LLM)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert SkipSoftmaxConfig.from_checkpoint(source) == expected


def test_pipeline_folder_has_a_configuration_per_component(tmp_path):
    other = {**FORMULA, "coefficients": {"a": 5.0, "b": 2.0}}
    write(tmp_path / "model_index.json", {"_class_name": "WanPipeline"})
    write(tmp_path / "transformer/config.json", WAN)
    write(tmp_path / "transformer_2/config.json", with_group(WAN, threshold_scale_factor=other))
    write(tmp_path / "vae/config.json", {"_class_name": "AutoencoderKLWan"})
    user = SkipSoftmaxConfig(target_sparsity=0.5)
    config = SkipSoftmaxConfig.from_checkpoint(tmp_path, user=user)
    assert {n: c.coefficients.a for n, c in config.components.items()} == {
        "transformer": 2822.6209952221557,
        "transformer_2": 5.0,
    }
    assert all(c.overflow == "clamp" for c in config.components.values())
    assert all(c.target_sparsity == 0.5 for c in config.components.values())


def test_unreadable_second_expert_is_dense_with_a_warning(tmp_path):
    write(tmp_path / "transformer/config.json", WAN)
    write(tmp_path / "transformer_2/config.json", "{ damaged")
    user = SkipSoftmaxConfig(target_sparsity=0.5, disabled_until_timestep=1.0)
    with pytest.warns(UserWarning, match="transformer_2 has no readable calibration: it is dense"):
        config = SkipSoftmaxConfig.from_checkpoint(tmp_path, user=user)
    assert config.options("prefill", "blocks.1.attn1", "transformer_2", batch_size=1) == {}
    # A threshold needs no calibration.
    user = SkipSoftmaxConfig(threshold=0.5)
    config = SkipSoftmaxConfig.from_checkpoint(tmp_path, user=user)
    assert config.components["transformer_2"].threshold == 0.5


def test_nothing_calibrated_is_refused(tmp_path):
    write(tmp_path / "transformer/config.json", {"_class_name": "WanTransformer3DModel"})
    with pytest.raises(ValueError, match="pass threshold instead"):
        SkipSoftmaxConfig.from_checkpoint(tmp_path)


def test_write_checkpoint_keeps_everything_else(tmp_path):
    other = {"algorithm": "sparse_softmax", "sparsity_n": 2}
    groups = {"group_0": other, "group_1": group_of(LLM)}
    old = {"architectures": ["X"], "sparse_attention_config": {"config_groups": groups}}
    write(tmp_path / "config.json", old)
    curve = Coefficients(
        a=3.0,
        b=4.0,
        c=1.96,
        sparsity_range=(0.1, 0.8),
        length_range=(2048, 8192),
        measured_in=Geometry.prefill(causal=True),
        r_squared=0.96,
        residual=0.5,
    )
    config = SkipSoftmaxConfig(
        target_sparsity=0.5, coefficients={"prefill": curve}, overflow="clamp", order="descending"
    )
    config.write_checkpoint(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    groups = written["sparse_attention_config"]["config_groups"]
    assert written["architectures"] == ["X"]
    assert groups["group_0"] == other
    formula = groups["group_1"]["threshold_scale_factor"]["formula"]
    assert formula == "a * exp(b * target_sparsity) * kv_len**(1 - c)"
    assert SkipSoftmaxConfig.from_checkpoint(tmp_path) == config
    assert [f.name for f in tmp_path.iterdir()] == ["config.json"]


def test_write_checkpoint_of_a_pipeline(tmp_path):
    for name in ("transformer", "transformer_2"):
        write(tmp_path / name / "config.json", {"_class_name": "WanTransformer3DModel"})
    parts = {
        "transformer": SkipSoftmaxConfig.from_checkpoint(WAN),
        "transformer_2": dataclasses.replace(SkipSoftmaxConfig.from_checkpoint(WAN), ignore=()),
    }
    config = SkipSoftmaxConfig(components=parts)
    config.write_checkpoint(tmp_path)
    assert SkipSoftmaxConfig.from_checkpoint(tmp_path) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_sparsity": 0.5}, "has no coefficients of its own"),
        ({"threshold": 0.5, "coefficients": Coefficients(a=1.0, b=1.0)}, "threshold is given"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SkipSoftmaxConfig(**fields).to_checkpoint()


# -- damaged files

ODD = [None, True, -1, 0, 2.5, 10**400, float("nan"), "x", "", [], [1, "a"], {}, {"a": {}}, [[]]]


def places(tree, path=()):
    """Paths of every key in a tree of mappings."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("odd", ODD, ids=repr if len(repr(ODD)) < 200 else lambda x: repr(x)[:12])
def test_damage_anywhere_is_read_or_refused_but_never_crashes(odd):
    full = SkipSoftmaxConfig(
        target_sparsity={"prefill": 0.5},
        coefficients={
            "prefill": Coefficients(
                a=3.0,
                b=4.0,
                c=2.0,
                sparsity_range=(0.1, 0.8),
                length_range=(2048, 8192),
                measured_in=Geometry.prefill(),
                r_squared=0.9,
                residual=0.5,
            )
        },
        disabled_until_timestep=0.5,
        ignore=["x"],
        order="ascending",
        overflow="clamp",
    ).to_checkpoint()
    messages = []
    for checkpoint in (LLM, WAN, full):
        for path in places(checkpoint):
            damaged = json.loads(json.dumps(checkpoint))
            parent = damaged
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = odd
            try:
                config = SkipSoftmaxConfig.from_checkpoint(damaged)
            except (ValueError, TypeError) as error:
                messages.append(f"{path}: {error}")
            else:
                config.to_checkpoint()
    assert messages
    assert [message for message in messages if "; expected" not in message] == []
