"""Speed of the inference engine and of vLLM."""
