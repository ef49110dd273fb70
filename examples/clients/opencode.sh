# opencode with the gateway as its only provider.
cat > opencode.json << EOF
{
  "provider": {
    "gateway": {
      "npm": "@ai-sdk/openai-compatible",
      "options": { "baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY" },
      "models": { "policy": {} }
    }
  },
  "share": "disabled",
  "autoupdate": false
}
EOF
export OPENCODE_DISABLE_MODELS_FETCH=1
exec opencode run --title sums --model gateway/policy
