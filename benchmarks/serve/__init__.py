"""Speed of the inference engine beside vLLM."""
