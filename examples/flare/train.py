"""A client of filters.py, as FLARE's users write them: it knows nothing of the filters."""

import nvflare.client as flare
import torch
from net import Net
from sklearn.datasets import load_digits
from torch.nn import functional

if __name__ == "__main__":
    flare.init()
    site = int(flare.get_site_name().removeprefix("site-"))
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    mine, test = torch.arange(len(x)) % 5 == site, torch.arange(len(x)) % 5 == 0
    model = Net()
    while flare.is_running():
        heard = flare.receive()
        model.load_state_dict({name: torch.as_tensor(value) for name, value in heard.params.items()})
        accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for rows in torch.randperm(int(mine.sum())).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[mine][rows]), y[mine][rows]).backward()
            optimizer.step()
        print(f"accuracy of the model heard: {accuracy:.3f}")
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}))
