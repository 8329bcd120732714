#include "device/recording_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace heddle::device {
namespace {

using Shape = RecordingPlaces::Shape;

/// Work that is recorded as the places say.
class Recorder {
 public:
  explicit Recorder(std::size_t places) : places_(places) {}

  /// Whether the work was replayed.
  bool run(const Shape& shape) {
    places_.meet(shape);
    if (std::ranges::find(recorded_, shape) != recorded_.end()) return true;
    const RecordingPlaces::Verdict verdict = places_.judge(shape, recorded_);
    if (!verdict.is_recorded) return false;
    if (verdict.instead) recorded_.erase(recorded_.begin() + static_cast<long>(*verdict.instead));
    recorded_.push_back(shape);
    ++recordings;
    return true;
  }
  std::size_t held() const { return recorded_.size(); }

  int recordings = 0;

 private:
  RecordingPlaces places_;
  std::vector<Shape> recorded_;
};

Shape shape(std::int64_t number) { return {0, number, number % 3}; }

TEST(RecordingPlaces, AShapeIsRecordedWhenItComesAgain) {
  Recorder recorder(4);
  EXPECT_FALSE(recorder.run(shape(1)));
  EXPECT_FALSE(recorder.run(shape(2)));
  EXPECT_TRUE(recorder.run(shape(1)));
  EXPECT_TRUE(recorder.run(shape(1)));
  EXPECT_EQ(recorder.recordings, 1);
}

TEST(RecordingPlaces, MoreShapesThanPlacesDoNotDriveEachOtherOut) {
  Recorder recorder(16);
  int replayed = 0;
  for (int round = 0; round < 100; ++round) {
    for (int number = 0; number < 20; ++number) replayed += recorder.run(shape(number)) ? 1 : 0;
  }
  EXPECT_EQ(recorder.recordings, 16);
  EXPECT_EQ(replayed, 16 * 99);
}

TEST(RecordingPlaces, ShapesThatNeverComeAgainTakeNoPlace) {
  Recorder recorder(2);
  for (int i = 0; i < 2000; ++i) {
    recorder.run(shape(1000 + i));
    EXPECT_EQ(recorder.run(shape(i % 2)), i > 1) << i;
  }
  EXPECT_EQ(recorder.recordings, 2);
}

TEST(RecordingPlaces, OftenUsedShapesDisplaceThoseOfBefore) {
  Recorder recorder(2);
  for (int i = 0; i < 200; ++i) recorder.run(shape(i % 2));
  int launched = 0;
  for (int i = 0; i < 600; ++i) launched += recorder.run(shape(7 + i % 2)) ? 0 : 1;
  EXPECT_EQ(recorder.recordings, 4);
  EXPECT_EQ(recorder.held(), 2U);
  EXPECT_LT(launched, 260);  // no later than the memory of the shapes before has gone
  EXPECT_TRUE(recorder.run(shape(7)));
  EXPECT_TRUE(recorder.run(shape(8)));
}

TEST(RecordingPlaces, TheRarestOfTheRecordedGivesWay) {
  Recorder recorder(3);
  for (const int number : {1, 1, 1, 1, 2, 2, 3, 3, 3}) recorder.run(shape(number));
  EXPECT_EQ(recorder.recordings, 3);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(recorder.run(shape(4))) << i;
  EXPECT_TRUE(recorder.run(shape(4)));  // as 2 came twice
  EXPECT_TRUE(recorder.run(shape(1)));
  EXPECT_TRUE(recorder.run(shape(3)));
  EXPECT_EQ(recorder.recordings, 4);
}

}  // namespace
}  // namespace heddle::device
