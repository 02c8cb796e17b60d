import warnings

# Said by third parties at every start, whatever the user does; what they fall back to is tested.
_KNOWN = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The pad token id in the tokenizer collides",
    r"`torch\.distributed\.\w+` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
)
for _message in _KNOWN:
    warnings.filterwarnings("ignore", message=_message)
