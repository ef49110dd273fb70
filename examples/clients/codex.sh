# Codex with the gateway as its only provider.
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" << EOF
model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
EOF
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -
