// Runs an encoder that Python has saved: run PACKAGE TOKEN TOKEN ..., without Python.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s PACKAGE TOKEN ...\n", argv[0]);
    return 2;
  }
  std::vector<int64_t> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoll(argv[i]));
  torch::inductor::AOTIModelPackageLoader encoder(argv[1]);
  c10::InferenceMode mode;
  const auto options = at::TensorOptions().dtype(at::kLong);
  const auto input = at::from_blob(tokens.data(), {1, static_cast<int64_t>(tokens.size())}, options);
  const std::vector<at::Tensor> inputs = {input};
  const at::Tensor states = encoder.run(inputs)[0].contiguous();
  const float* numbers = states.const_data_ptr<float>();
  for (int64_t row = 0; row < states.size(1); ++row) {
    for (int64_t column = 0; column < states.size(2); ++column) {
      std::printf("%.9g ", numbers[row * states.size(2) + column]);
    }
    std::printf("\n");
  }
}
