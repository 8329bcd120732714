#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "data/jinja/ast.h"
#include "data/jinja/builtins.h"

namespace heddle::data::jinja {

/// The variables of the template, of a loop's pass, of a macro call. A name is looked for here and
/// then outwards.
class Scope {
 public:
  explicit Scope(Scope* outer) : outer_(outer) {}
  const Value* find(int symbol) const;
  void set(int symbol, Value value);
  /// A macro refers to this scope and those around it, so they outlive the block they belong to.
  void keep();
  bool is_kept() const { return is_kept_; }

 private:
  const Value* own(int symbol) const;

  Scope* outer_;
  bool is_kept_ = false;
  std::vector<std::pair<int, Value>> values_;
  /// Places in values_, of a scope with many: a template may have tens of thousands.
  std::unique_ptr<std::unordered_map<int, std::size_t>> index_;
};

/// One rendering of a template. Not reusable.
class Interpreter {
 public:
  struct Limits {
    std::uint64_t max_steps;
    std::size_t max_bytes;  ///< of one text
    std::size_t max_built;  ///< of all texts that are built on the way
  };
  Interpreter(const Template& source, const Limits& limits) : template_(source), limits_(limits) {}
  ~Interpreter();

  /// Bytes [begin, end) of the output that one pass of a loop over dictionaries wrote.
  struct Pass {
    const DictData* item;
    std::size_t begin, end;
  };
  /// Throws DataError with the template's name, the line and the reason. `passes` gets those that
  /// wrote something straight into the output.
  std::string run(std::vector<std::pair<std::string, Value>> variables,
                  std::vector<std::pair<std::size_t, std::size_t>>& generation_spans,
                  std::vector<Pass>& passes);

  Namespace* make_namespace();
  /// Counts work, so that a template always ends: one per item touched.
  void work(std::uint64_t items);
  /// Counts bytes of text that are built, so that memory stays bounded.
  void built(std::size_t bytes);
  std::size_t max_bytes() const { return limits_.max_bytes; }
  /// Cost of looking through a value, in steps.
  static std::uint64_t cost(const Value& value) { return value.extent().weight; }
  static std::uint64_t cost_of_comparing(const Value& a, const Value& b);
  static std::uint64_t cost_of_finding(const Value& what, const Value& container);
  /// iterate(), with its work counted.
  Values items_of(const Value& value);
  Value attribute(const Value& object, const std::string& name) const;
  Value item(const Value& object, const Value& key) const;
  [[noreturn]] void fail_undefined(const Undefined& value) const;

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  /// Nested evaluations, statements and macro calls; Python's own bound is of this order.
  static constexpr int kDeepestStack = 800;
  class InnerScope;

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<DataError>("{}:{}: {}", template_.name, line_,
                           fmt::format(format, std::forward<Args>(args)...));
  }

  class Depth {
   public:
    explicit Depth(Interpreter& interpreter) : interpreter_(interpreter) {
      if (++interpreter_.depth_ > kDeepestStack) {
        --interpreter_.depth_;
        interpreter_.fail("more than {} nested evaluations (a macro that never ends?)",
                          kDeepestStack);
      }
      interpreter_.work(1);
    }
    ~Depth() { --interpreter_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    Interpreter& interpreter_;
  };

  Flow run(const Body& body);
  Flow run(const Statement& statement);
  Flow run_if(const Statement& statement);
  Flow run_for(const Statement& statement);
  void run_set_block(const Statement& statement);
  void run_macro_definition(const Statement& statement);
  void run_call_block(const Statement& statement);
  Flow run_generation(const Statement& statement);
  Flow run_with(const Statement& statement);
  void run_filter_block(const Statement& statement);
  void write(std::string_view text);
  void assign(const Target& target, const Value& value);
  /// Output of `body`, in a scope of its own.
  std::string captured(const Body& body);

  Value evaluate(const Expr& expr);
  Value evaluate_name(const Expr& expr);
  Value evaluate_attribute(const Expr& expr);
  Value evaluate_slice(const Expr& expr);
  Value evaluate_call(const Expr& expr);
  Value evaluate_filter(const Expr& expr, const Value* subject);
  Value evaluate_test(const Expr& expr);
  Value evaluate_list(const Expr& expr);
  Value evaluate_dict(const Expr& expr);
  Value evaluate_concat(const Expr& expr);
  Value evaluate_binary(const Expr& expr);
  Value evaluate_compare(const Expr& expr);
  Value evaluate_sign(const Expr& expr);
  bool compare(Expr::Op op, const Value& a, const Value& b);
  CallArguments evaluate(const Arguments& arguments);
  Value call(const Value& callee, const CallArguments& arguments);
  Value call_macro(const Callable& callable, const CallArguments& arguments);

  const Template& template_;
  Limits limits_;
  int line_ = 1;
  int depth_ = 0;
  std::uint64_t steps_ = 0;
  std::size_t bytes_built_ = 0;
  std::string* out_ = nullptr;
  const std::string* whole_ = nullptr;  ///< The output itself: out_ outside of what is captured.
  Scope* scope_ = nullptr;
  std::vector<std::pair<std::size_t, std::size_t>>* spans_ = nullptr;
  std::vector<Pass>* passes_ = nullptr;
  std::vector<std::unique_ptr<Scope>> kept_scopes_;
  std::vector<std::unique_ptr<Namespace>> namespaces_;
};

}  // namespace heddle::data::jinja
