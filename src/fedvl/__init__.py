"""FedVL: parties that may not pool their images adapt one pretrained vision-language model together."""

__version__ = "0.1.0"
