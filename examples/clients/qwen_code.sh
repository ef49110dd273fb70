# qwen-code with the gateway as its only provider.
mkdir -p "$HOME/.qwen"
cat > "$HOME/.qwen/settings.json" << EOF
{
  "memory": { "enableManagedAutoMemory": false },
  "privacy": { "usageStatisticsEnabled": false },
  "general": { "enableAutoUpdate": false }
}
EOF
exec qwen --yolo --auth-type openai --model policy
