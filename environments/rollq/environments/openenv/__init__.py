"""The kind `openenv`: environments behind the websocket of OpenEnv's servers, without the package."""
