// Classes by name: where the names come from, what final/ says, what evaluation and score report.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/json/json_text.h"
#include "train/class_labels.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Words = std::vector<std::string>;

class ClassLabels : public TrainerTest {
 protected:
  /// Rows whose text tells their label.
  std::string rows(const std::string& name, const std::vector<ordered_json>& labels,
                   int count = 36) const {
    std::ofstream out(dir_ / name);
    for (int i = 0; i < count; ++i) {
      const ordered_json& label = labels[static_cast<std::size_t>(i) % labels.size()];
      out << ordered_json{{"text", "it is " + data::json_text::dump(label)}, {"label", label}}
                 .dump()
          << "\n";
    }
    return (dir_ / name).string();
  }
  Words classifier(const std::string& data, Words more = {}) const {
    more.insert(more.begin(), {"data.train=" + data, "model.head=classify"});
    return more;
  }
  config::RunConfig found(Words more) const {
    config::RunConfig config = this->config("run", std::move(more));
    train::find_class_labels(config);
    return config;
  }
  std::string refusal(Words more) const {
    return message_of([&] { found(std::move(more)); });
  }
  ordered_json config_of(const std::string& folder) const {
    return ordered_json::parse(files::read(dir_ / folder / "config.json"));
  }
  int sft(const std::string& run, Words more) const {
    Words all = arguments(run, std::move(more));
    all.insert(all.begin(), "sft");
    return run_cli(all);
  }
  std::vector<ordered_json> lines(const std::string& name) const {
    std::ifstream in(dir_ / name);
    std::vector<ordered_json> all;
    for (std::string line; std::getline(in, line);) all.push_back(ordered_json::parse(line));
    return all;
  }
};

TEST_F(ClassLabels, ComeFromTheRowsSorted) {
  const config::RunConfig config = found(classifier(rows("a.jsonl", {"pos", "neg", "é so-so"})));
  EXPECT_THAT(config.data.labels, ElementsAre("neg", "pos", "é so-so"));
  EXPECT_EQ(config.model.num_labels, 3);
  // Given ones keep their order, and may name classes that no row has.
  EXPECT_THAT(found(classifier(rows("a.jsonl", {"pos", "neg"}), {"data.labels=[pos, neg, none]"}))
                  .data.labels,
              ElementsAre("pos", "neg", "none"));
  // Numbers stay numbers, as JSON and as digits of a CSV.
  for (const std::vector<ordered_json>& numbers :
       std::vector<std::vector<ordered_json>>{{0, 1, 2}, {"0", "1", "2"}}) {
    const config::RunConfig numbered =
        found(classifier(rows("n.jsonl", numbers), {"model.num_labels=3"}));
    EXPECT_THAT(numbered.data.labels, ElementsAre());
  }
  // One label is regression.
  EXPECT_THAT(found(classifier(rows("r.jsonl", {0.5, 1.5}), {"model.num_labels=1"})).data.labels,
              ElementsAre());
}

TEST_F(ClassLabels, AreRefusedWhereTheyDoNotFit) {
  EXPECT_THAT(refusal(classifier(rows("n.jsonl", {0, 1}))),
              HasSubstr("classify needs model.num_labels >= 1, as the labels of data.train are "
                        "numbers"));
  EXPECT_THAT(refusal(classifier(rows("a.jsonl", {"a", "b"}), {"model.num_labels=3"})),
              HasSubstr("data.train has 2 different labels (0 = a, 1 = b), model.num_labels is 3: "
                        "name all classes in data.labels"));
  EXPECT_THAT(refusal(classifier(rows("a.jsonl", {"a"}))), HasSubstr("has 1 different labels"));
  std::vector<ordered_json> many;
  for (int i = 0; i <= train::kMostClasses; ++i) many.push_back("text " + std::to_string(i));
  EXPECT_THAT(refusal(classifier(rows("m.jsonl", many, train::kMostClasses + 1))),
              AllOf(HasSubstr("m.jsonl:1001: field 'label': the rows have more than 1000"),
                    HasSubstr("data.fields.label")));
  const std::string two = rows("two.jsonl", {"a", "b"});
  EXPECT_THAT(refusal_of(classifier(two, {"data.labels=[a, b, a]"})),
              HasSubstr("'a' is given twice"));
  EXPECT_THAT(refusal_of(classifier(two, {"data.labels=[a]"})), HasSubstr("expected two"));
  EXPECT_THAT(refusal_of(classifier(two, {"data.labels=[a, b]", "model.num_labels=3"})),
              HasSubstr("model.num_labels: is 3, but data.labels names 2 classes"));
  EXPECT_THAT(refusal_of(classifier(two, {"data.labels=[a, c]"})),
              AllOf(HasSubstr("two.jsonl:2: field 'label': is \"b\", expected one of the 2 labels: "
                              "a, c"),
                    HasSubstr("data.labels names others")));
}

TEST_F(ClassLabels, AreOfOneKind) {
  const std::string mixed = rows("mixed.jsonl", {"spam", "ham", 1});
  for (const char* policy : {"error", "skip"}) {
    EXPECT_THAT(refusal(classifier(mixed, {std::string("data.on_bad_line=") + policy})),
                HasSubstr("mixed.jsonl:3: field 'label': 1 is a number, but labels before it are "
                          "texts"));
  }
  EXPECT_THAT(refusal(classifier(rows("vice.jsonl", {1, "ham"}))),
              HasSubstr("vice.jsonl:2: field 'label': ham is a text, but labels before it are "
                        "numbers"));
  // Rows without a usable label give no class; they are named, or left out, when tokenised.
  for (const ordered_json& other : {ordered_json(), ordered_json(true), ordered_json("")}) {
    const std::string data = rows("holes.jsonl", {"spam", "ham", other});
    EXPECT_THAT(found(classifier(data, {"data.on_bad_line=skip"})).data.labels,
                ElementsAre("ham", "spam"));
  }
  EXPECT_THAT(refusal(classifier(rows("empty.jsonl", {"spam", "ham", ""}))),
              HasSubstr("empty.jsonl:3: field 'label': is empty"));
  EXPECT_THAT(
      refusal_of(classifier(rows("null.jsonl", {"spam", nullptr}), {"data.labels=[ham, spam]"})),
      AllOf(HasSubstr("null.jsonl:2: "), HasSubstr("label")));
}

TEST_F(ClassLabels, OfTheModelAreTakenWhereTheySayMoreThanNumbers) {
  const auto with_names = [&](const ordered_json& id2label) {
    std::filesystem::remove_all(dir_ / "named");
    std::filesystem::copy(dir_ / "model", dir_ / "named");
    ordered_json config = config_of("model");
    config["id2label"] = id2label;
    std::ofstream(dir_ / "named/config.json") << config.dump();
    return "model.path=" + (dir_ / "named").string();
  };
  const std::string numbered = rows("n.jsonl", {0, 1, 2});
  const config::RunConfig same =
      found(classifier(numbered, {with_names({{"0", "0"}, {"1", "1"}, {"2", "2"}})}));
  EXPECT_THAT(same.data.labels, ElementsAre());
  EXPECT_EQ(same.model.num_labels, 3);
  // The order of the file is no matter; numbers are looked up among names of digits.
  const std::string stars = with_names({{"2", "3"}, {"0", "1"}, {"1", "2"}});
  EXPECT_THAT(found(classifier(rows("s.jsonl", {3, 1, 2}), {stars})).data.labels,
              ElementsAre("1", "2", "3"));
  EXPECT_THAT(refusal(classifier(rows("a.jsonl", {"a", "b"}),
                                 {with_names({{"0", "a"}, {"1", "b"}, {"2", "a"}})})),
              AllOf(HasSubstr("named/config.json: id2label: 'a' is the name of two classes")));
  // Names that leave numbers out are none.
  EXPECT_THAT(
      found(classifier(rows("a.jsonl", {"x", "y"}), {with_names({{"0", "y"}, {"02", "x"}})}))
          .data.labels,
      ElementsAre("x", "y"));
}

TEST_F(ClassLabels, AreNotNeededToShowRows) {
  const auto shows = [&](Words arguments) {
    arguments.insert(arguments.begin(), {"tokenize", "model.path=" + (dir_ / "model").string(),
                                         "model.head=classify"});
    std::string output;
    return run_cli(arguments, &output) == 0 &&
           output.find(" tokens, 0 with loss") != std::string::npos;
  };
  EXPECT_TRUE(shows({"data.train=" + rows("n.jsonl", {0, 1})}));
  EXPECT_TRUE(shows({"data.train=" + rows("one.jsonl", {"a"})}));
  EXPECT_TRUE(shows({"--input", rows("a.jsonl", {"a", "b"})}));
  EXPECT_TRUE(shows({"data.train=" + (dir_ / "nowhere.jsonl").string(), "model.num_labels=3",
                     "--input", rows("a.jsonl", {"a", "b"})}));
}

TEST_F(ClassLabels, GoIntoTheResultAndComeBackFromIt) {
  const std::string train = rows("a.jsonl", {"pos", "neg", "so-so"});
  const std::string held = rows("held.jsonl", {"so-so", "neg", "pos"}, 9);
  ASSERT_EQ(sft("run", classifier(train, {"data.eval=" + held, "train.eval_every=6",
                                          "train.max_steps=40", "optim.lr=3e-3"})),
            0);
  const ordered_json config = config_of("run/final");
  EXPECT_EQ(config["id2label"].dump(), R"({"0":"neg","1":"pos","2":"so-so"})");
  EXPECT_EQ(config["label2id"].dump(), R"({"neg":0,"pos":1,"so-so":2})");
  // A checkpoint's export says the same.
  ASSERT_EQ(run_cli({"export", (dir_ / "run/checkpoints/step-00000040").string(), "--output",
                     (dir_ / "exported").string()}),
            0);
  EXPECT_EQ(config_of("exported")["id2label"], config["id2label"]);

  // The held-out rows are told apart, by every count.
  double accuracy = -1, f1 = -1;
  for (const ordered_json& row : lines("run/metrics.jsonl")) {
    if (row.contains("eval_accuracy")) accuracy = row["eval_accuracy"];
    if (row.contains("eval_f1_macro")) f1 = row["eval_f1_macro"];
  }
  EXPECT_EQ(accuracy, 1);
  EXPECT_EQ(f1, 1);
  ASSERT_EQ(run_cli({"score", (dir_ / "run/final").string(), "--input", held, "--output",
                     (dir_ / "scored.jsonl").string()}),
            0);
  for (const ordered_json& row : lines("scored.jsonl"))
    EXPECT_EQ(row["predicted_label"], row["label"]);
  ASSERT_EQ(run_cli({"eval", (dir_ / "run/final").string(), "--input", held, "--output",
                     (dir_ / "judged.jsonl").string()}),
            0);
  for (const ordered_json& row : lines("judged.jsonl"))
    EXPECT_EQ(row["predicted_label"], row["label"]);

  // Training goes on with the names that the model has, whatever order the rows' labels have.
  config::RunConfig again =
      this->config("again", classifier(rows("b.jsonl", {"so-so", "pos"}),
                                       {"model.path=" + (dir_ / "run/final").string()}));
  train::find_class_labels(again);
  EXPECT_THAT(again.data.labels, ElementsAre("neg", "pos", "so-so"));
}

TEST_F(ClassLabels, GoOnWithTheNumbersOfAnAdapter) {
  const std::vector<std::string> lora = {"train.method=lora", "train.max_steps=1",
                                         "optim.warmup_steps=0"};
  std::vector<std::string> named = lora;
  named.emplace_back("data.labels=[so-so, pos, neg]");
  ASSERT_EQ(sft("first", classifier(rows("a.jsonl", {"pos", "neg"}), named)), 0);
  std::vector<std::string> from = lora;
  from.push_back("adapter.path=" + (dir_ / "first/final").string());
  config::RunConfig again =
      this->config("again", classifier(rows("b.jsonl", {"neg", "so-so"}), from));
  train::find_class_labels(again);
  EXPECT_THAT(again.data.labels, ElementsAre("so-so", "pos", "neg"));
  ASSERT_EQ(sft("again", classifier(rows("b.jsonl", {"neg", "so-so"}), from)), 0);
  EXPECT_EQ(files::read(dir_ / "again/final/id2label.json"),
            files::read(dir_ / "first/final/id2label.json"));
  // Another order of the classes would turn the head round.
  from.emplace_back("data.labels=[neg, pos, so-so]");
  config::RunConfig turned = this->config("turned", classifier(rows("b.jsonl", {"neg"}), from));
  EXPECT_THAT(heddle::testing::message_of([&] { train::find_class_labels(turned); }),
              ::testing::HasSubstr("leave it out, or write [so-so, pos, neg]"));
}

TEST_F(ClassLabels, CountEveryClassOnceInMacroF1) {
  // An untrained head answers one class, mostly: macro-F1 is below accuracy.
  const std::string train = rows("a.jsonl", {"a", "b", "c", "d"}, 40);
  ASSERT_EQ(
      sft("run", classifier(train, {"data.eval=" + train, "train.eval_every=1", "train.max_steps=1",
                                    "optim.lr=1e-9", "optim.warmup_steps=0"})),
      0);
  ASSERT_EQ(run_cli({"score", (dir_ / "run/final").string(), "--input", train, "--output",
                     (dir_ / "scored.jsonl").string()}),
            0);
  std::map<std::string, double> predicted, real, right;
  double hits = 0;
  for (const ordered_json& row : lines("scored.jsonl")) {
    const std::string guess = row["predicted_label"], truth = row["label"];
    ++predicted[guess];
    ++real[truth];
    right[truth] += guess == truth;
    hits += guess == truth;
  }
  double sum = 0;
  for (const auto& [label, count] : real) {
    const double precision = predicted[label] > 0 ? right[label] / predicted[label] : 0;
    const double recall = right[label] / count;
    sum += precision + recall > 0 ? 2 * precision * recall / (precision + recall) : 0;
  }
  double accuracy = -1, f1 = -1;
  for (const ordered_json& row : lines("run/metrics.jsonl")) {
    if (row.contains("eval_accuracy")) accuracy = row["eval_accuracy"];
    if (row.contains("eval_f1_macro")) f1 = row["eval_f1_macro"];
  }
  EXPECT_NEAR(accuracy, hits / 40, 1e-12);
  EXPECT_NEAR(f1, sum / static_cast<double>(real.size()), 1e-12);
}

}  // namespace
}  // namespace heddle
