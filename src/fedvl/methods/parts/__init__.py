"""Parts that several methods are made of."""
