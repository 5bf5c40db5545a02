"""The loops that train: the hook and the driver behind it, the built-in GPT, and the loop without unicrond.

Use `hook.Hook` (`from unicrond import Hook`), `driver.Driver` (carries out the lifecycle's effects), `local`,
`pretrain_gpt`. Megatron-LM's own loop lives in `megatron`.
"""
