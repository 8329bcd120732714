#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <ostream>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "cli/chat_partner.h"
#include "cli/command.h"
#include "cli/option_checks.h"
#include "cli/stop_request.h"
#include "cli/template_arguments.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ChatOptions {
  ChatPartnerOptions partner;
  std::string system;
  bool shows_thinking = false;
};

constexpr const char* kHelp =
    "/undo           take the last question and its answer back\n"
    "/system TEXT    set the system message; without TEXT there is none\n"
    "/reset          begin anew; the system message stays\n"
    "/help           this list\n"
    "/exit           end, as Ctrl-D does\n"
    "A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.\n";

/// Shows an answer as it comes, its thinking folded unless asked for.
class AnswerView {
 public:
  AnswerView(const Session& session, bool shows_thinking, bool is_terminal)
      : out_(session.out),
        has_color_(session.out_has_color),
        shows_thinking_(shows_thinking),
        is_terminal_(is_terminal) {}

  void show(const data::AnswerDelta& delta) {
    if (!delta.reasoning.empty()) {
      if (!is_thinking_ && has_color_) out_ << "\x1b[2m";
      if (!is_thinking_ && !shows_thinking_ && is_terminal_) out_ << "[thinking ...]";
      is_thinking_ = true;
      if (shows_thinking_) out_ << delta.reasoning;
    }
    if (!delta.content.empty()) {
      end_thinking();
      out_ << delta.content;
    }
    out_ << std::flush;
  }
  void end() {
    end_thinking();
    out_ << "\n" << std::flush;
  }

 private:
  void end_thinking() {
    if (!is_thinking_) return;
    is_thinking_ = false;
    if (has_color_) out_ << "\x1b[0m";
    if (shows_thinking_ || is_terminal_) out_ << "\n\n";
  }

  std::ostream& out_;
  bool has_color_, shows_thinking_, is_terminal_;
  bool is_thinking_ = false;
};

class Chat {
 public:
  Chat(const ChatOptions& options, const Session& session)
      : options_(options),
        session_(session),
        is_terminal_(isatty(STDIN_FILENO) == 1),
        partner_(is_server(options.partner.model.directory) ? server_partner(options.partner)
                                                            : local_partner(options.partner)) {
    set_system(options.system);
  }

  int run() {
    if (is_terminal_) session_.out << "/help lists commands, Ctrl-D ends.\n";
    while (const auto line = read()) {
      if (text::trim(*line).empty()) continue;
      if (line->starts_with('/')) {
        if (!obey(*line)) return 0;
      } else if (const int signal = ask(*line)) {
        return 128 + signal;
      }
    }
    if (is_terminal_) session_.out << "\n";
    return 0;
  }

 private:
  /// One message; nothing at the end of the input.
  std::optional<std::string> read() const {
    std::string message, line;
    for (const char* prompt = "> ";; prompt = ". ") {
      if (is_terminal_) session_.out << prompt << std::flush;
      if (!std::getline(std::cin, line)) {
        if (message.empty()) return std::nullopt;
        return message;
      }
      if (!line.ends_with('\\')) return message + line;
      message += line.substr(0, line.size() - 1) + "\n";
    }
  }

  /// False at the end of the chat.
  bool obey(const std::string& line) {
    const std::size_t space = line.find(' ');
    const std::string command = line.substr(0, space);
    const std::string argument(
        space == std::string::npos ? "" : text::trim(std::string_view(line).substr(space)));
    if (command == "/exit" || command == "/quit") return false;
    if (command == "/undo") {
      undo();
    } else if (command == "/system") {
      set_system(argument);
    } else if (command == "/reset") {
      messages_.erase(messages_.begin() + has_system(), messages_.end());
    } else if (command == "/help") {
      session_.out << kHelp;
    } else {
      log::warning("{}: no such command; /help lists them", command);
    }
    return true;
  }

  /// Adds a question and its answer. The signal that ends the program, or 0.
  int ask(const std::string& question) {
    messages_.push_back({{"role", "user"}, {"content", question}});
    const StopRequest stop;
    AnswerView view(session_, options_.shows_thinking, is_terminal_);
    ChatPartner::Answer answer;
    try {
      answer = partner_->answer(
          messages_, [&](const data::AnswerDelta& delta) { view.show(delta); }, stop.flag());
    } catch (const DataError& error) {
      // A person can go on with a shorter conversation; a script has to know.
      if (!is_terminal_) throw;
      messages_.erase(messages_.size() - 1);
      log::error("{}", error.what());
      return 0;
    }
    view.end();
    if (answer.is_cut)
      log::warning("the answer is cut: --max-new-tokens or the context is reached");
    Json message = {{"role", "assistant"}, {"content", answer.message.content}};
    if (!answer.message.reasoning.empty()) message["reasoning_content"] = answer.message.reasoning;
    messages_.push_back(std::move(message));
    return stop.flag() && stop.signal() != SIGINT ? stop.signal() : 0;
  }

  void undo() {
    if (messages_.size() < has_system() + 2) {
      log::warning("there is nothing to undo");
      return;
    }
    messages_.erase(messages_.end() - 2, messages_.end());
  }

  std::size_t has_system() const {
    return !messages_.empty() && messages_[0]["role"] == "system" ? 1 : 0;
  }
  void set_system(const std::string& text) {
    if (has_system() > 0) messages_.erase(0);
    if (!text.empty())
      messages_.insert(messages_.begin(), Json{{"role", "system"}, {"content", text}});
  }

  const ChatOptions& options_;
  const Session& session_;
  bool is_terminal_;
  std::unique_ptr<ChatPartner> partner_;
  Json messages_ = Json::array();
};

int run(const ChatOptions& options, const Session& session) {
  check(options.partner.sampling);
  const std::int64_t tokens = options.partner.max_new_tokens.value_or(kUsualAnswer);
  if (tokens < 1) throw_error<ConfigError>("--max-new-tokens is {}: expected 1 or more", tokens);
  if (options.partner.context < 0)
    throw_error<ConfigError>("--context is {}: expected a count", options.partner.context);
  if (!options.partner.served_model.empty() && !is_server(options.partner.model.directory)) {
    throw_error<ConfigError>("--model names a model of a server, and {} is a directory",
                             options.partner.model.directory);
  }
  return Chat(options, session).run();
}

}  // namespace

void add_chat_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<ChatOptions>();
  ChatPartnerOptions& partner = options->partner;
  CLI::App* command = app.add_subcommand("chat", "Talk to a model in the terminal");
  add_model_arguments(*command, partner.model);
  command->get_option("model_dir")
      ->description(
          "A Hugging Face model directory, or an OpenAI-compatible server, as "
          "http://127.0.0.1:8000 "
          "($OPENAI_API_KEY is its key)")
      ->type_name("MODEL_DIR|URL");
  command->add_option("--model", partner.served_model,
                      "Which of the server's models or adapters; default the only one");
  command->add_option("--system", options->system, "The system message");
  command->add_flag("--show-thinking", options->shows_thinking, "Show what the model thinks");
  add_template_arguments(*command, partner.template_arguments);
  command->add_option("--max-new-tokens", partner.max_new_tokens,
                      "Of an answer, at most; default 2048, or the server's");
  command
      ->add_option("--context", partner.context,
                   "Tokens of conversation and answer; 0: 8192, or fewer if the model has fewer")
      ->capture_default_str();
  add_sampling_arguments(*command, partner.sampling);
  command->add_option("--stop", partner.stop, "End where this text begins (repeatable)")
      ->check(not_empty());
  add_kernel_argument(*command, partner.model);
  command->footer(
      "Lines of the standard input are questions; /help lists commands.\n"
      "\n"
      "Examples:\n"
      "  heddle chat runs/chat/final\n"
      "  heddle chat http://127.0.0.1:8000 --model billing\n"
      "  printf 'What is 12 + 30?\\n' | heddle chat runs/chat/final --temperature 0");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
