"""Which model classes of the release can be tapped: known before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.load import check_target
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

# Classes that have no method to capture hidden states, and whether what their decoder layers return is still to be
# summed. Some return a residual that is in the hidden states already: no signature tells, so each class is listed
# when a test has compared its taps with those of transformers. Qwen2.5-VL's has the method, but that keeps no
# embeddings of pictures, and to those that the batch has later layers add in place on a GPU.
SUMS_LATER = {
    "ArceeForCausalLM": True,
    "Cohere2ForCausalLM": False,
    "CohereForCausalLM": False,
    "Gemma2ForCausalLM": True,
    "Gemma3ForCausalLM": False,
    "GemmaForCausalLM": True,
    "Glm4ForCausalLM": True,
    "Glm4vForConditionalGeneration": True,
    "Glm4vMoeForConditionalGeneration": True,
    "GraniteForCausalLM": True,
    "GraniteMoeForCausalLM": False,
    "MiMoV2FlashForCausalLM": True,
    "MixtralForCausalLM": True,
    "Olmo2ForCausalLM": False,
    "OlmoForCausalLM": False,
    "OlmoeForCausalLM": True,
    "Qwen2VLForConditionalGeneration": True,
    "Qwen2_5_VLForConditionalGeneration": True,
    "Qwen3_5ForConditionalGeneration": True,
    "Qwen3_5MoeForConditionalGeneration": True,
    "Qwen3VLForConditionalGeneration": True,
    "Qwen3VLMoeForConditionalGeneration": True,
    "StableLmForCausalLM": False,
    "Starcoder2ForCausalLM": False,
}

# Classes that put pictures into a language model's prompts. The method to capture hidden states tells nothing of them:
# of several that have it, layers, embedding or head are where nobody looks.
WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)

# Those that are shown videos, too. The release hands none to Kimi-K2.5, and transformers none to Gemma 3 and Llama 4.
WITH_VIDEOS = tuple(name for name in WRAPPERS if not name.startswith(("Gemma3", "Kimi", "Llama4")))

# Classes with linear attention of which it was tried that states are brought to the accepted token.
LINEAR = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def has_linear_attention(target: ModelConfig) -> bool:
    """Whether some layers of a target keep recurrent states instead of K/V."""
    return hasattr(type(target.hf_text_config), "mamba2_cache_params")


def is_wrapper(model_class: type[nn.Module]) -> bool:
    """Whether it is one of the multimodal classes that DFLASH runs."""
    return model_class.__name__ in WRAPPERS


def language_model(model: nn.Module) -> nn.Module:
    """What has layers, embedding, head and logits processor of a target: some wrappers keep it as a whole."""
    return getattr(model, "language_model", model)


def captures_itself(model_class: type[nn.Module]) -> bool:
    """Whether the class has the release's own method to capture hidden states."""
    return hasattr(model_class, "set_eagle3_layers_to_capture")


def check_model(config: DraftConfig, target: ModelConfig, path: str, flag: str) -> None:
    """Whether a drafter fits a target, and whether the release runs it as something that can be tapped.

    Args:
        path, flag: of the target, as the user gave it.

    Raises:
        DFlashError: names the first thing that does not fit.
    """
    from sglang.srt.configs.model_config import is_deepseek_nsa
    from sglang.srt.model_loader.utils import get_model_architecture

    model_class = get_model_architecture(target)[0]
    # The release runs some of these without their pictures, and then calls them text models.
    has_text_part = target.hf_config is not target.hf_text_config
    if (target.is_multimodal or has_text_part) and not is_wrapper(model_class):
        raise DFlashError(
            f"{flag} {path} runs as {model_class.__name__}, which wraps a language model in a way that DFLASH does not "
            "know: use a multimodal target of docs/targets.md, as Qwen3-VL, or a text model."
        )
    check_target(config, target.hf_text_config, target.vocab_size)
    if has_linear_attention(target) and model_class.__name__ not in LINEAR:
        raise DFlashError(
            f"{flag} {path} runs as {model_class.__name__}, whose recurrent states DFLASH cannot bring back behind a "
            "rejected token: use a target of docs/targets.md, as Qwen3-Next."
        )
    if is_deepseek_nsa(target.hf_text_config):
        raise DFlashError(
            f"{flag} {path} runs as {model_class.__name__}, whose layers choose the keys that they read, which DFLASH "
            "was never compared with: use a target of docs/targets.md, as DeepSeek-V3."
        )
    check_class(model_class, path, flag)


def check_class(model_class: type[nn.Module], path: str, flag: str) -> None:
    """Raises `DFlashError` if hidden states of such a target cannot be tapped."""
    name = model_class.__name__
    if not captures_itself(model_class) and name not in SUMS_LATER and name not in WRAPPERS:
        raise DFlashError(
            f"{flag} {path} runs as {name}, whose hidden states DFLASH cannot tap: use a target of an architecture in "
            "docs/targets.md, as Qwen3, Llama or Gemma 3."
        )
