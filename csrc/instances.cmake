# What is built: every kernel of csrc/kernels/ with the configs it is compiled for. A config is a named
# policy of the kernel's source; its host side, which chooses among them, is in cake_ops/cuda/.

cake_kernel(
  sm90_grouped_gemm # forward (nt) and data gradient (nn): layout of B, tile, cluster
  nt_128x256_c2
  nn_128x256_c2
  nt_128x128_c1
  nn_128x128_c1
  nt_64x128_c1
  nn_64x128_c1)

cake_kernel(
  sm90_grouped_gemm_wgrad # weight gradient: type of dW, store or add, tile, cluster
  bf16_store_128x256_c2
  bf16_add_128x256_c2
  f32_store_128x256_c2
  f32_add_128x256_c2
  bf16_store_128x128_c1
  bf16_add_128x128_c1
  f32_store_128x128_c1
  f32_add_128x128_c1)

cake_kernel(
  sm90_router_gemm # forward (nt), data and weight gradient (nn, tn): type of B, tile, cluster
  nt_f32_64x8_k8
  nt_f32_64x16_k8
  nt_f32_64x24_k8
  nt_f32_128x40_k8
  nt_f32_128x80_k8
  nt_f32_128x152_k8
  nt_bf16_64x24_k8
  nt_bf16_128x40_k8
  nt_bf16_128x152_k8
  nn_f32_64x32_k1
  nn_f32_64x48_k1
  nn_f32_128x32_k1
  nn_f32_128x64_k1
  nn_f32_128x80_k1
  nn_f32_128x96_k1
  nn_f32_128x112_k1
  nn_f32_128x128_k1
  tn_f32_64x32_k1
  tn_f32_128x32_k1
  tn_f32_128x64_k1
  tn_f32_128x80_k1
  tn_f32_128x96_k1
  tn_f32_128x128_k1
  tn_f32_128x96_k8
  tn_bf16_128x64_k1
  tn_bf16_128x80_k1
  tn_bf16_128x96_k1
  tn_bf16_128x80_k8)
