"""An agent loop of two turns."""

from rollq.buffer import FinishReason, Sample
from rollq.workers import Conversation, Rollout, finish, next_request, parse_reason, prompt_messages, tokens_left


class Revise:
    """Ask the model to check its answer."""

    resumable = False  # the default; if True, interrupted tokens come back as `rollout.previous`; see `rollout.keep`

    def __init__(self, words: str = "Check that, and answer again.") -> None:
        self.words = words

    async def run(self, rollout: Rollout) -> Sample:
        conversation = Conversation.begin(rollout.tokenizer, prompt_messages(rollout.prompt), tools=())
        draft = await rollout.generate(next_request(rollout, conversation, 1))
        reason, conversation = parse_reason(draft.finish_reason), conversation.after_model(draft)
        if reason is FinishReason.STOP:
            question = conversation.after_environment([{"role": "user", "content": self.words}])
            if tokens_left(rollout, question) < 1:
                reason = FinishReason.LENGTH
            else:
                answer = await rollout.generate(next_request(rollout, question, 2))
                reason, conversation = parse_reason(answer.finish_reason), question.after_model(answer)
        return finish(rollout, conversation.segments, reason, conversation.messages[-1]["content"])
