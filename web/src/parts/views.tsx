// Saved views of the fleet: named URLs, stored in this browser.

import { Form, text } from './form'
import { TextField } from './fields'

interface View { name: string; path: string }

const viewsKey = 'lull-views'

export function savedViews(): View[] {
  try {
    const list: unknown = JSON.parse(localStorage.getItem(viewsKey) ?? '[]')
    return Array.isArray(list) ? list.filter((v): v is View => typeof v?.name === 'string' && typeof v?.path === 'string' && v.path.startsWith('/') && !v.path.startsWith('//')) : []
  } catch {
    return [] // another version of lull wrote it
  }
}

const put = (list: View[]) => localStorage.setItem(viewsKey, JSON.stringify(list))

export const forgetView = (name: string) => put(savedViews().filter((v) => v.name !== name))

export function SaveView(p: { path: string; onClose: () => void }) {
  const send = async (f: FormData) => {
    const name = text(f, 'name')
    put([...savedViews().filter((v) => v.name !== name), { name, path: p.path }])
    return `Saved view ${name} in this browser.`
  }
  return (
    <Form title="Save this view" submit="Save" onClose={p.onClose} send={send}>
      <p>The page's URL contains the search, filters and order, so you can also share it.</p>
      <TextField id="v-name" name="name" label="Name" required max={40} />
    </Form>
  )
}
