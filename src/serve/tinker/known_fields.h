#pragma once

#include <string_view>

namespace heddle::serve::tinker {

/// Names of an object's fields, with spaces between them.
struct Known {
  std::string_view taken;       ///< They have an effect, or are refused with a reason.
  std::string_view notes = {};  ///< Clients send them, and no answer depends on them.
};

/// Fields of the objects that clients send: all those of the tinker SDK from 0.16.1 to 0.38.0. Any
/// other is refused by name, as nobody could tell a misspelt one from one that is ignored; null
/// counts as not given, so a newer client may leave unset what this server does not know. Bodies
/// that nothing is read of (client/config, telemetry) are not looked at.
namespace known {

inline constexpr Known kAny{"*"};  ///< Names that are values: of inputs, of numbers.

// Sessions.
inline constexpr Known kCreateSession{"tags user_metadata project_id display_name",
                                      "sdk_version type"};
inline constexpr Known kHeartbeat{"session_id", "type"};
inline constexpr Known kFinishSession{"reason detail"};
inline constexpr Known kFinishReason{"type"};
inline constexpr Known kSearchSessions{
    "session_id limit owner user_metadata display_name statuses project_ids cursor"};
inline constexpr Known kSearchOwner{"type owner_urns"};

// Promises.
inline constexpr Known kRetrieveFuture{"request_id allow_metadata_only"};
inline constexpr Known kRetrieveFutures{"target prev_cursor timeout retrieved_request_ids"};
inline constexpr Known kFuturesTarget{"type sampling_session_id cloned_sampler_id"};
inline constexpr Known kCancelFuture{"request_id"};

// Runs.
inline constexpr Known kCreateModel{
    "session_id model_seq_id base_model user_metadata lora_config optimizer_config", "type"};
inline constexpr Known kLoraConfig{"rank seed train_unembed train_mlp train_attn"};
inline constexpr Known kOptimizerConfig{"type version"};
inline constexpr Known kRun{"model_id", "type"};  ///< get_info and unload_model.
inline constexpr Known kForward{"model_id seq_id forward_input"};
inline constexpr Known kForwardBackward{"model_id seq_id forward_backward_input"};
inline constexpr Known kLossInput{"data loss_fn loss_fn_config"};
inline constexpr Known kDatum{"model_input loss_fn_inputs",
                              "model_input_spans loss_fn_input_spans"};
inline constexpr Known kModelInput{"chunks"};
inline constexpr Known kTextChunk{"type tokens"};
inline constexpr Known kTensor{"data dtype shape sparse_crow_indices sparse_col_indices"};
inline constexpr Known kOptimStep{"model_id seq_id adam_params optimizer_params", "type"};
inline constexpr Known kAdamParams{"learning_rate beta1 beta2 eps weight_decay grad_clip_norm"};

// Weights.
inline constexpr Known kSaveWeights{"model_id path seq_id ttl_seconds overwrite user_metadata",
                                    "type"};
inline constexpr Known kSaveWeightsForSampler{
    "model_id path sampling_session_seq_id kind seq_id ttl_seconds overwrite user_metadata",
    "type"};
inline constexpr Known kSaveWeightsExternal{
    "model_id path seq_id ttl_seconds overwrite user_metadata age_encryption_recipients", "type"};
inline constexpr Known kLoadWeights{
    "model_id seq_id session_id model_seq_id base_model user_metadata path optimizer "
    "optimizer_config weights_access_token",
    "type"};
inline constexpr Known kWeightsInfo{"tinker_path"};
inline constexpr Known kCopyWeights{
    "session_id model_seq_id destination_project_id source_path ttl_seconds weights_access_token"};
inline constexpr Known kSetTtl{"ttl_seconds"};

// Samples.
inline constexpr Known kCreateSamplingSession{
    "session_id sampling_session_seq_id base_model model_path", "type"};
inline constexpr Known kJoinSamplingSession{"sampling_session_id", "type"};
inline constexpr Known kSample{
    "num_samples prompt sampling_params base_model model_path sampling_session_id seq_id "
    "prompt_logprobs topk_prompt_logprobs topk_sample_logprobs target_prompt_logprobs "
    "prompt_alt_tokens_k prompt_logprobs_last_n record_stability_info",
    "type"};
inline constexpr Known kSamplingParams{"max_tokens seed stop temperature top_k top_p"};

// Queries of addresses.
inline constexpr Known kOne{"access_scope"};
inline constexpr Known kList{"limit offset access_scope project_id"};
inline constexpr Known kAudit{"event_type day"};

}  // namespace known
}  // namespace heddle::serve::tinker
