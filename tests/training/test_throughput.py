"""The rate of training."""

from ngrammer_jax.training import throughput


def test_rates_leave_out_what_is_not_training(monkeypatch):
  now = 100.0
  monkeypatch.setattr(throughput.time, 'monotonic', lambda: now)
  meter = throughput.Meter()
  now = 102.0
  meter.pause()
  now = 150.0
  meter.resume()
  now = 152.0
  meter.measure(400)
  assert meter.rate == 100.0
  now = 153.0  # nor does what was before it count again
  meter.measure(50)
  assert meter.rate == 50.0


def test_the_peak_of_a_device_is_that_of_its_longest_name():
  assert throughput.peak_flops('TPU v5 lite') == throughput.PEAK_FLOPS['TPU v5 lite']
  assert throughput.peak_flops('NVIDIA A100-SXM4-40GB') == throughput.PEAK_FLOPS['NVIDIA A100']
  assert throughput.peak_flops('cpu') is None
