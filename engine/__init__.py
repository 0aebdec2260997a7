"""The inference engine: scheduler, caches, models, kernels, text. Knows neither Ray nor HTTP."""
