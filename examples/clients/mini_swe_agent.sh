# mini-swe-agent with the gateway as its only provider.
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
exec mini --yolo --exit-immediately --model openai/policy --task "$(cat)"
